#!/bin/bash
#SBATCH --job-name=mfu-sweep-ab12cd
#SBATCH --comment=mfu-sweep:ab12cd34ef56
#SBATCH --array=0-5%4
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --output=/shared/outputs/s/.sweep/slurm/ab12cd34ef56/%A_%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR2@60
#SBATCH --dependency=afterany:17

# caches on the node's own disk: compilers lock and rename there, and users must not meet in one folder
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-${TMPDIR:-/tmp}/mfu-sweep-$(id -u)/inductor}"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/mfu-sweep-$(id -u)/triton}"
export PYTHONPATH=/shared/outputs/s/.sweep/code-12345678"${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1

# one supervisor a node; it starts the ranks and always leaves with 0
srun --unbuffered --wait=60 --output=/shared/outputs/s/.sweep/slurm/ab12cd34ef56/%A_%a-%t.log \
  python -m train.launch.slurm.job /shared/outputs/s/.sweep/slurm/ab12cd34ef56

#!/bin/bash
#SBATCH --job-name=mfu-sweep-ab12cd
#SBATCH --comment=mfu-sweep:ab12cd34ef56
#SBATCH --array=0-5
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --output=/shared/outputs/s/.sweep/slurm/ab12cd34ef56/%A_%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR2@60
#SBATCH --qos=high

export PYTHONPATH=/shared/outputs/s/.sweep/code-12345678"${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1

# one supervisor a node; it starts the ranks and always leaves with 0
srun --unbuffered --wait=60 --output=/shared/outputs/s/.sweep/slurm/ab12cd34ef56/%A_%a-%t.log \
  python -m train.launch.slurm.job /shared/outputs/s/.sweep/slurm/ab12cd34ef56

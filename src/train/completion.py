"""TAB completion of `python -m train` in bash. Hydra's own covers installed commands and `python FILE.py`, not `-m`."""

BASH = r"""
_mfu_sweep_complete() {
    local words=($COMP_LINE)
    [ "${words[1]}" = "-m" ] && [ "${words[2]}" = "train" ] || return
    local choices
    choices=$(COMP_LINE="mfu-sweep ${COMP_LINE#*-m train }" "${words[0]}" -m train -sc query=bash 2>/dev/null)
    COMPREPLY=($(compgen -W "$choices" -- "${COMP_WORDS[COMP_CWORD]}"))
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -o bashdefault -F _mfu_sweep_complete python python3
""".strip()


def asked(program: str, overrides: list[str]) -> bool:
    """Whether `python -m train -sc install=bash` is what was typed."""
    return overrides == ["install=bash"] and program.endswith("__main__.py")

"""``worldsize completion bash|zsh|fish``: print shell code that completes commands, options and keys.

Options and keys come from Hydra's completion for ``train``.
"""

from __future__ import annotations

import argparse

from worldsize.cli import COMMANDS

_COMPOSED = ("train", "plan", "rehearse", "scale", "doctor")  # commands that accept groups and keys

_BASH = r"""
_worldsize() {
  local current=${COMP_WORDS[COMP_CWORD]} typed=${COMP_LINE:0:$COMP_POINT} choices
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W "@COMMANDS@" -- "$current"))
  elif [[ " @COMPOSED@ " == *" ${COMP_WORDS[1]} "* ]]; then
    typed="worldsize ${typed#*" ${COMP_WORDS[1]} "}"
    choices=$(COMP_LINE=$typed COMP_POINT=${#typed} worldsize train -sc query=bash 2> /dev/null)
    COMPREPLY=($(compgen -W "$choices" -- "$current"))
  else
    COMPREPLY=($(compgen -W last -- "$current") $(compgen -f -- "$current"))
  fi
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -F _worldsize worldsize
"""

_FISH = r"""
function __worldsize_keys
  set -l words (commandline --cut-at-cursor --tokenize) (commandline --cut-at-cursor --current-token)
  set -l typed "worldsize $words[3..-1]"
  set -lx COMP_LINE "$typed"
  set -lx COMP_POINT (string length -- "$typed")
  worldsize train -sc query=bash 2> /dev/null | string split ' '
end
complete -c worldsize -e
complete -c worldsize -f -n "__fish_seen_subcommand_from @COMPOSED@" -a "(__worldsize_keys)"
complete -c worldsize -n "not __fish_use_subcommand; and not __fish_seen_subcommand_from @COMPOSED@" -a last
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="worldsize completion", description=__doc__)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help='e.g. eval "$(worldsize completion bash)"')
    print(render_completion(parser.parse_args().shell))


def render_completion(shell: str) -> str:
    """Return the script that completes commands, options and keys in ``shell``."""
    text = _FISH if shell == "fish" else _BASH
    if shell == "zsh":
        text = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n" + text
    if shell == "fish":
        text += "".join(
            f"complete -c worldsize -f -n __fish_use_subcommand -a {name} -d {meaning!r}\n"
            for name, meaning in COMMANDS.items()
        )
    return text.replace("@COMMANDS@", " ".join(COMMANDS)).replace("@COMPOSED@", " ".join(_COMPOSED)).strip()

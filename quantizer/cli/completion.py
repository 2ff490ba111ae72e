"""``quantizer completion``: a script with which bash and zsh complete verbs, options and backends."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from rich.console import Console

from quantizer.cli.verb import Verb
from quantizer.targets import AUTO, profiles

_BASH = """\
_quantizer() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" found=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    found="{verbs}"
  elif [ "$before" = --backend ] || [ "$before" = --target ]; then
    found="{backends}"
  else
    case "$word" in -*)
      case "${{COMP_WORDS[1]}}" in
{options}
      esac ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$found" -- "$word"))
}}
complete -o default -F _quantizer quantizer"""

_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
"""Before the same script: zsh's own way to take one of bash."""

_SHELLS = {"bash": "", "zsh": _ZSH}


class Completion:
    """Verb that prints the completion script of a shell.

    Args:
        verbs: the other verbs.
    """

    name = "completion"
    help = "print what makes bash or zsh complete verbs, options and backends"
    rest: str | None = None
    epilog = """\
example:
  quantizer completion bash

The line  eval "$(quantizer completion bash)"  in ~/.bashrc, or with zsh in ~/.zshrc, takes it into every shell."""

    def __init__(self, verbs: Sequence[Verb]) -> None:
        self._verbs = verbs

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=" or ".join(_SHELLS))

    def __call__(self, args: Namespace, console: Console) -> int:
        verbs: list[Verb] = [*self._verbs, self]
        script = _BASH.format(
            verbs=" ".join([*(verb.name for verb in verbs), "--help", "--version"]),
            backends=" ".join([AUTO, *profiles.names()]),
            options="\n".join(f'        {verb.name}) found="{" ".join(_options(verb))}" ;;' for verb in verbs),
        )
        # Not by the console, which breaks lines at the width of the terminal.
        print(_SHELLS[args.shell] + script)
        return 0


def _options(verb: Verb) -> list[str]:
    parser = ArgumentParser()
    verb.add_arguments(parser)
    return [option for action in parser._actions for option in action.option_strings if option.startswith("--")]

"""Write what `piper explain` says of an unchanged Llama of Hugging Face's into docs/language.md; needs `transformers`.

python -m benchmarks.shard_page writes it, with --check it says whether the page is what is printed today.
"""

from __future__ import annotations

import sys
from pathlib import Path

import piper
from piper.cli.loading import load_file
from piper.views.explain_layouts import layouts

ROOT = Path(__file__).parents[1]
PAGE, EXAMPLE = ROOT / "docs" / "language.md", ROOT / "examples" / "hugging_face_llama.py"
FIRST, LAST, FENCE = "  layer0, layer1", "  root.1", "```\n"


def printed() -> str:
    """Return what is said of the layers."""
    loaded = load_file(EXAMPLE)
    text = layouts(piper.compile(loaded.job, loaded.strategy))
    return text[text.index(FIRST) : text.index(LAST)]


def written(page: str, shown: str) -> str:
    """Return the page with `shown` in place of what it shows of the layers."""
    start = page.index(FENCE + FIRST, page.index("## shard")) + len(FENCE)
    return page[:start] + shown + page[page.index(FENCE, start) :]


def main(arguments: list[str]) -> int:
    """Write or check the page, and return the exit code: 1 where it shows something else."""
    page = PAGE.read_text()
    made = written(page, printed())
    if arguments == ["--check"]:
        print("the page shows what is printed" if made == page else f"{PAGE} shows something else")
        return int(made != page)
    PAGE.write_text(made)
    print(f"{PAGE}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

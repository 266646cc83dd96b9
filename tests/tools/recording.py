"""Record commands in a terminal as a picture: `python -m tests.tools.recording PICTURE.svg SAMPLE MODEL`.

SAMPLE is the folder that `bertkit sample` writes, and MODEL a sentence encoder. The commands run in a new folder, in
which both have short names. The picture has the last state of each line, so that a progress bar is shown at its end.
"""

import contextlib
import io
import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 100
SESSION = (
    "bertkit classify --data sample/topics --text text --label topic --model all-MiniLM-L6-v2 --epochs 4 "
    "--output runs/topics",
    'bertkit predict runs/topics "Read a table from an Excel file." "Remove hum from a recorded voice."',
)
# The fonts that rich's picture would load from another site
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def record(command: str, folder: str) -> Text:
    """Run a command in a terminal, and return what it shows at the end."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    words = [sys.executable, "-m", *shlex.split(command)]
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=folder)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # on Linux, the end of a terminal is an error
        while part := os.read(ours, 1 << 16):
            shown += part
    text = shown.decode().replace("\r\n", "\n")
    if process.wait():
        raise SystemExit(f"{command} failed:\n{text}")
    return Text.from_ansi(text)


if __name__ == "__main__":
    picture, sample, model = map(Path, sys.argv[1:])
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sample").symlink_to(sample.resolve())
        Path(folder, "all-MiniLM-L6-v2").symlink_to(model.resolve())
        for command in SESSION:
            console.print(f"[bold]$ {command}[/]", record(command, folder), sep="\n")
    picture.write_text(FONTS.sub("", console.export_svg(title="bertkit")), encoding="utf-8")

"""The project as one importable package: `gpipe_bench.pipeline`, `.models`, `.planner`, `.harness`,
`.experiments`.

The packages are folders of the repository's root; this package links to them, so that a user's own
`models/` or `pipeline/` cannot be taken for ours. A built wheel holds them in here.
"""

from pathlib import Path

__version__ = "0.1.0"

if not (Path(__file__).parent / "pipeline" / "__init__.py").is_file():
    # A checkout without symbolic links: unpacked from an archive, or on a file system that has none.
    __path__.append(str(Path(__file__).resolve().parents[1]))

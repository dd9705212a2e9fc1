"""Which modules are installed packages, and where from: what a fork server may import, and never the user's own files.

Runs in the parent.
"""

import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

__all__ = ["install_path", "installed_modules"]


def install_path() -> list[str]:
    """Return where torch, loky and fifobatch come from, and nothing of the user's own before them.

    A ``torch.py`` beside the user's script must not be what the server imports.
    """
    roots = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    path = [entry for entry in sys.path if any(entry.startswith(root) for root in roots) or _is_site(Path(entry))]
    for name in ("torch", "loky", "cloudpickle", "tqdm", "fifobatch"):
        home = str(Path(sys.modules[name].__file__ or "").parents[1])
        if home not in path:
            path.append(home)
    return path


def _is_site(path: Path) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def installed_modules(names: Iterable[str]) -> frozenset[str]:
    """Return those of the modules that are installed packages: not the user's own files, nor the standard library's."""
    found = set()
    for name in names:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if spec is not None and spec.origin is not None and _is_site(Path(spec.origin)):
            found.add(name)
    return frozenset(found)

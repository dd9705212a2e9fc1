"""With this folder on PYTHONPATH, loky and fifobatch cannot import psutil, also not in the fork server; tests can.

PYTHONPATH=$PWD/tests/without_psutil python -m pytest tests/test_crashes.py
"""

import builtins

_import = builtins.__import__


def _import_but_psutil(name, globals=None, locals=None, fromlist=(), level=0):
    if name == "psutil" and str((globals or {}).get("__name__")).startswith(("loky.", "fifobatch.")):
        raise ModuleNotFoundError("psutil is not there, for this one", name="psutil")
    return _import(name, globals, locals, fromlist, level)


builtins.__import__ = _import_but_psutil

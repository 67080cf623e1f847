"""Nothing that another process, a file or a model brings is unpickled: a pickle is a program."""

from __future__ import annotations

import ast

from tests.arch.source import expect_none, modules

FORBIDDEN = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def test_nothing_is_unpickled():
    found = []
    for module in modules("qwengyre", "qwengyre_harness"):
        for node in ast.walk(module.tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{module.path}:{node.lineno} imports {name}" for name in names if name.split(".")[0] in FORBIDDEN]
            if isinstance(node, ast.Call):
                options = {word.arg: ast.unparse(word.value) for word in node.keywords}
                called = ast.unparse(node.func)
                if called == "torch.load" and options.get("weights_only") != "True":
                    found.append(f"{module.path}:{node.lineno} loads more than weights")
                if options.get("allow_pickle") == "True":
                    found.append(f"{module.path}:{node.lineno} allows pickles")
    expect_none(found)

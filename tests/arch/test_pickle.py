"""Nothing that another process, a file or a model brings is unpickled: a pickle is a program."""

from __future__ import annotations

import ast

from tests.arch.source import dotted, expect_none, imported, modules

FORBIDDEN = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def test_nothing_is_unpickled():
    found = []
    for module in modules("qwengyre", "qwengyre_harness"):
        found += [f"{module.path}:{line} imports {name}" for line, name in imported(module) if name.split(".")[0] in FORBIDDEN]
        for node in module.all_of(ast.Call):
            options = {
                word.arg: ast.unparse(word.value) for word in node.keywords if word.arg in ("weights_only", "allow_pickle")
            }
            if dotted(node.func) == "torch.load" and options.get("weights_only") != "True":
                found.append(f"{module.path}:{node.lineno} loads more than weights")
            if options.get("allow_pickle") == "True":
                found.append(f"{module.path}:{node.lineno} allows pickles")
    expect_none(found)

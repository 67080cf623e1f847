from qwengyre.config.lines import key_lines, line_of

TEXT = '''# a comment = 1
name = "x"

[scheduler]   # [not.a.table]
phi = 1
"mu" = 2
text = """
fake = 3
[fake]
"""
values = [
  "a = 1",   # ] b = 2
  "c",
]
last = {a = 1, b = 2}
[scheduler.inner]
deep.er = true
[[items]]
a = 1
'''


def test_every_key_has_its_line_and_text_in_values_is_no_key():
    assert key_lines(TEXT) == {
        ("name",): 2,
        ("scheduler",): 4,
        ("scheduler", "phi"): 5,
        ("scheduler", "mu"): 6,
        ("scheduler", "text"): 7,
        ("scheduler", "values"): 11,
        ("scheduler", "last"): 15,
        ("scheduler", "inner"): 16,
        ("scheduler", "inner", "deep", "er"): 17,
        ("items",): 18,
        ("items", "a"): 19,
    }


def test_line_of_an_absent_key_is_that_of_its_table():
    lines = key_lines(TEXT)
    assert line_of(lines, ("scheduler", "inner", "absent")) == 16
    assert line_of(lines, ("scheduler", "last", "b")) == 15
    assert line_of(lines, ("nowhere", "x")) is None

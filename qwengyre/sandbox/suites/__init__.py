"""Suites of tasks in other formats, written as task folders: `qwengyre tasks import` and `qwengyre tasks pull`."""

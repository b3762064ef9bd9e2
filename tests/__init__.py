"""Tests of the package. Their processes hold a million objects of what they import, and looked through them for garbage in a
tenth of their time: they look seldom (processes that a test starts are as users have them)."""

import gc

gc.set_threshold(20_000, 20, 20)

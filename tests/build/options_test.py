"""A bad entry of the build matrix stops at configure time: `options_test.py CMAKE`. Run by ctest."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CMAKE: list[str] = []


def configure(*options: str, **environment: str) -> tuple[int, str]:
    """(exit status, output with line breaks folded) of a host-only configure run."""
    fixed = ["-DHOPPER_ATTENTION_HOST_ONLY=ON", "-DHOPPER_ATTENTION_TESTS=OFF", "-DHOPPER_ATTENTION_PYTHON=OFF"]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HOPPER_ATTENTION_")}
    with tempfile.TemporaryDirectory() as folder:
        command = [*CMAKE, "-S", str(ROOT), "-B", folder, f"-DPython_EXECUTABLE={sys.executable}", *fixed, *options]
        done = subprocess.run(command, capture_output=True, text=True, env={**clean, **environment}, timeout=120)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


class Options(unittest.TestCase):
    def test_known_entries(self):
        status, output = configure("-DHOPPER_ATTENTION_HEAD_DIMS=64;128", "-DHOPPER_ATTENTION_DTYPES=bf16")
        self.assertEqual(status, 0, output)

    def test_unknown_head_dim(self):
        status, output = configure("-DHOPPER_ATTENTION_HEAD_DIMS=128;100")
        self.assertNotEqual(status, 0)
        self.assertIn('HOPPER_ATTENTION_HEAD_DIMS: unknown entry "100"; known entries: 64;', output)

    def test_unknown_dtype(self):
        status, output = configure("-DHOPPER_ATTENTION_DTYPES=fp64")
        self.assertNotEqual(status, 0)
        self.assertIn('HOPPER_ATTENTION_DTYPES: unknown entry "fp64"', output)

    def test_empty_list(self):
        status, output = configure("-DHOPPER_ATTENTION_HEAD_DIMS=")
        self.assertNotEqual(status, 0)
        self.assertIn("HOPPER_ATTENTION_HEAD_DIMS is empty", output)

    def test_the_environment_is_read(self):
        status, output = configure(HOPPER_ATTENTION_HEAD_DIMS="128, 99")
        self.assertNotEqual(status, 0)
        self.assertIn('unknown entry "99"', output)

    def test_the_command_line_wins_over_the_environment(self):
        status, output = configure("-DHOPPER_ATTENTION_HEAD_DIMS=128", HOPPER_ATTENTION_HEAD_DIMS="99")
        self.assertEqual(status, 0, output)

    def test_a_prebuilt_library_that_is_not_there(self):
        status, output = configure("-DHOPPER_ATTENTION_PREBUILT=/nowhere")
        self.assertNotEqual(status, 0)
        self.assertIn("there is no /nowhere/libhopper_attention.so", output)


if __name__ == "__main__":
    CMAKE.append(sys.argv[1])
    unittest.main(argv=sys.argv[:1], verbosity=2)

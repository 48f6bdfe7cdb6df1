"""The gate on ptxas output rejects planted bad kernels: `ptxas_gate_test.py NVCC HOST_COMPILER`. Run by ctest."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
GATE = HERE.parents[1] / "cmake" / "ptxas_gate.py"
COMPILER: list[str] = []
WARNINGS = "--warn-on-spills,--warn-on-local-memory-usage,--warning-as-error"


class PtxasGate(unittest.TestCase):
    def compile(self, unit: str, ptxas: str) -> tuple[int, str, bool, str]:
        """(exit status, what was printed, whether an object was left, the kept ptxas output)."""
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / f"{unit}.cu.o"
            flags = ["-std=c++20", "-gencode=arch=compute_90a,code=sm_90a", f"-Xptxas={ptxas}"]
            command = [*COMPILER, *flags, "-c", str(HERE / f"{unit}.cu"), "-o", str(output)]
            gate = [sys.executable, str(GATE), folder, *command]
            done = subprocess.run(gate, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
            return done.returncode, done.stdout, output.exists(), (Path(folder) / f"{unit}.txt").read_text()

    def rejects(self, unit: str, ptxas: str, reason: str) -> None:
        status, printed, left, kept = self.compile(unit, ptxas)
        self.assertNotEqual(status, 0, printed)
        self.assertRegex(printed, reason)
        self.assertFalse(left, "the rejected object must not be left for the linker")
        self.assertIn("seconds: ", kept)

    def test_a_good_kernel_passes(self):
        status, printed, left, kept = self.compile("good", f"-v,{WARNINGS}")
        self.assertEqual((status, left), (0, True), printed)
        self.assertIn("Used", kept)

    def test_serialised_wgmma_although_ptxas_only_informs(self):
        self.rejects("serialised_wgmma", f"-v,{WARNINGS}", r"rejected\n.*notes of serialised WGMMA")

    def test_spills_by_the_flags_of_the_build(self):
        self.rejects("spill", f"-v,{WARNINGS}", "spilled")

    def test_spills_by_the_gate_alone(self):
        self.rejects("spill", "-v", "functions spill registers")

    def test_stack_frame_by_the_flags_of_the_build(self):
        self.rejects("stack_frame", f"-v,{WARNINGS}", "stack frame")

    def test_stack_frame_by_the_gate_alone(self):
        self.rejects("stack_frame", "-v", "functions have a stack frame")

    def test_a_list_of_headers_that_is_gone(self):
        said = "Compiling entry function 'k' for 'sm_90a' Used 8 registers"
        writes = f"import sys; open(sys.argv[2], 'w'); print({said!r})"
        for left in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                output, headers = Path(folder) / "unit.cu.o", Path(folder) / "unit.d"
                if left:
                    headers.touch()
                compiler = [sys.executable, "-c", writes, "-o", str(output), "-MF", str(headers)]
                gate = [sys.executable, str(GATE), folder, *compiler]
                done = subprocess.run(gate, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
                self.assertEqual((done.returncode == 0, output.exists()), (left, left), done.stdout)
                self.assertEqual("headers is gone" in done.stdout, not left)

    def test_a_silent_ptxas(self):
        self.rejects("good", WARNINGS, "ptxas reported no kernel")


if __name__ == "__main__":
    nvcc, host_compiler = sys.argv[1:3]
    COMPILER[:] = [nvcc, f"-ccbin={host_compiler}"]
    unittest.main(argv=sys.argv[:1], verbosity=2)

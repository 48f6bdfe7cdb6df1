"""`python -m hopper_attention.bench`: speed of this library beside its peers, every answer checked against float64.

| module | what it holds |
|---|---|
| suites | the cases, as data, and how much work each is |
| inputs, check | random tensors of a case; whether a result is right |
| peers, fa3, triton_fa2 | the implementations behind one interface |
| timing | CUDA graph replays, interleaved; the ceilings of the card |
| run | one case, one report: a dict that is the JSON file |
| record | what the entries of a report say, and the best speeds known |
| goals | whether a report reaches what is wanted |
| table, compare, plots | report -> text and figures |
| kernels | metadata, combine, merge, append: the kernels beside attention |
| host, traffic | host time of a call; DRAM bytes beside `reference.io` |
| progress | how far a run is, on stderr |

Importing any of them but inputs, check, triton_fa2 needs no torch; rich and matplotlib are the extra `bench`.
"""

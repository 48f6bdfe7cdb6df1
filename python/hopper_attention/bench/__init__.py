"""`python -m hopper_attention.bench`: speed of this library beside its peers, every answer checked against float64.

| module | what it holds |
|---|---|
| suites | the cases, as data, and how much work each is |
| inputs, check | random tensors of a case; whether a result is right |
| peers, fa3, triton_fa2 | the implementations behind one interface |
| timing | CUDA graph replays, interleaved; the ceilings of the card |
| run | one case, one report: a dict that is the JSON file |
| table, compare, plots | report -> text and figures |
| host, traffic | host time of a call; DRAM bytes beside `reference.io` |

Importing any of them but inputs, check, triton_fa2 needs no torch; rich and matplotlib are the extra `bench`.
"""

import sys, time
import harness
from harness import run_ranks
import test_stages as t
from staging import *
from staging import _train_rank

def probe(name, plan_json, steps):
    import cProfile,pstats,io
    p=cProfile.Profile(time.process_time); p.enable()
    _train_rank(name, plan_json, steps)
    p.disable()
    s=io.StringIO(); pstats.Stats(p,stream=s).sort_stats("cumtime").print_stats(60)
    return s.getvalue()

if __name__ == "__main__":
    plan = staged_plan("gpt2", t.LAYOUTS["1 + 2"], schedule="1f1b", zero_stage=1)
    r = run_ranks(probe, 3, "gpt2", plan.model_dump_json(), 3)
    print(r[1])

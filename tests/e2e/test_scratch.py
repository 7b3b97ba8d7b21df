import time
from engine_process import run
def test_a(start_engine, random_prompts):
    P=dict(temperature=0,max_tokens=64,ignore_eos=True,detokenize=False)
    prompts=random_prompts(8)
    t=time.time(); e=start_engine(None); print("START",time.time()-t)
    t=time.time(); a=run(e,prompts,P); print("GEN",time.time()-t)
    t=time.time(); g=start_engine({}); print("START",time.time()-t)
    t=time.time(); b=run(g,prompts,P); print("GEN",time.time()-t)
    t=time.time(); b=run(g,prompts,P); print("GEN",time.time()-t)
    for r in a: print(r[:32])
    m=g.metrics(); print({k:v for k,v in m.items() if "gsd" in k or "spec" in k})
    print(sum(map(len,b))*2/m["gsd_target_steps"])
    assert a==b

import json, os, sys, time, torch, yaml
sys.path[:0] = ["src", "."]
from train import config
from train.data.fake import Fake
from train.memory import recompute
from train.measure import flops, peaks
from train.model import attention
from train.model.transformer import Transformer
print(torch.__version__, torch.cuda.get_device_name())
cuda = torch.device("cuda")
for hd, h, kv, dt in ((128,16,8,torch.bfloat16),(64,32,8,torch.bfloat16),(32,4,2,torch.bfloat16),(128,16,8,torch.float32),(128,16,8,torch.float64),(128,16,16,torch.bfloat16)):
    print(hd,h,kv,dt, dict(attention.probe(cuda,dt,h,kv,hd)))
print(peaks.measure(cuda, torch.bfloat16))
cfg = config.from_dict(config.Model, yaml.safe_load(open("conf/model/dense_1b.yaml")))
def build(path, rec, comp, mb, layers=None):
    import dataclasses
    c = dataclasses.replace(cfg, layers=layers) if layers else cfg
    with torch.device("meta"): m = Transformer(c, path).bfloat16()
    m.to_empty(device="cuda"); t=time.time(); m.init_weights(0); torch.cuda.synchronize(); print("init", time.time()-t)
    recompute.apply(m, config.Memory("m", rec))
    if comp: m.compile_layers()
    return m, Fake(cfg.vocab, 2048, 0, cuda)
def steps(m, f, mb, n):
    for s in range(n):
        b = f.batch(s, 0, mb); m(b[:, :-1], b[:, 1:]).backward()
        if s < n-1:
            for p in m.parameters(): p.grad = None
for path, rec, comp, mb in (("cudnn","none",True,16),("cudnn","full",True,16),("flash","none",True,16),("cudnn","none",False,8),("cudnn","none",True,4)):
    torch._dynamo.reset(); torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()
    m, f = build(path, rec, comp, mb)
    t=time.time(); steps(m,f,mb,1); torch.cuda.synchronize(); first=time.time()-t
    steps(m,f,mb,4); torch.cuda.synchronize(); t=time.time(); steps(m,f,mb,10); torch.cuda.synchronize(); dt=(time.time()-t)/10
    fl=flops.flops_per_token(cfg,2048,rec)
    print(path,rec,comp,mb,"fwd+bwd ms",round(dt*1e3,1),"first s",round(first,1),"mfu_causal %",round(100*mb*2048/dt*fl["mfu_causal"]/989.4e12,1),"peak GiB",round(torch.cuda.max_memory_allocated()/2**30,1))
    del m, f
# bitwise: recompute full = none, deterministic flash, eager and compiled
torch.use_deterministic_algorithms(True)
for comp in (False, True):
    out=[]
    for rec in ("none","full"):
        torch._dynamo.reset()
        m,f=build("flash",rec,comp,2,layers=3)
        b=f.batch(0,0,2); l=m(b[:,:-1],b[:,1:]); l.backward(); out.append([l.detach()]+[p.grad for p in m.parameters()])
    print("recompute bitwise, compiled" if comp else "recompute bitwise, eager", all(torch.equal(a,b) for a,b in zip(*out)))

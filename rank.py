import sys
from floe_chat.engine.planning import plan, machine
from floe_chat.engine.planning.machine import Described
sys.path.insert(0,'/work/main')
import dataclasses
from floe_chat.engine.planning.speed_estimate import Speeds
GB=1<<30
def m(ram,vram=0,**k):
    return machine.Machine("x",int(ram*GB),int(vram*GB),500*GB,8,dataclasses.replace(Speeds(read=40e9, link=12e9, gpu=250e9*(vram>0), gpu_flops=2e13*(vram>0), disk=2e9),**k),0.3)
for mm in (m(5),m(13),m(28),m(60),m(28,8),m(28,12),m(60,24,gpu=600e9),m(12,6)):
    print('==',mm.ram/GB,mm.vram/GB)
    for p in plan.offers(mm):
        c=p.chosen
        print('  ',p.entry.name,plan.standing(p.entry,c),plan.size_rule(p.entry), c and (round(c.decode.mid,1), round(c.ram_share,2), c.kl))

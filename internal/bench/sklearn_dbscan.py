"""scikit-learn's DBSCAN as a measured process: POINTS DIMS EPS MIN_SAMPLES RUNS LABELS (see clusteronce)."""
import json
import sys
import time

import numpy as np
from sklearn.cluster import DBSCAN


def memory(key):
    with open("/proc/self/status") as f:
        for line in f:
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    raise SystemExit("no %s in /proc/self/status" % key)


points_file, dims, eps, min_samples, runs, labels_file = sys.argv[1:]
points = np.fromfile(points_file, dtype="<f8").reshape(-1, int(dims))
before = memory("VmRSS:")
cpu = []
for i in range(int(runs)):
    start = time.process_time()
    model = DBSCAN(eps=float(eps), min_samples=int(min_samples), algorithm="kd_tree", n_jobs=1).fit(points)
    cpu.append(time.process_time() - start)
    if i == 0:
        peak = memory("VmHWM:")
core = np.zeros(len(points), dtype=np.uint8)
core[model.core_sample_indices_] = 1
with open(labels_file, "wb") as f:
    f.write(model.labels_.astype("<i4").tobytes())
    f.write(core.tobytes())
print(json.dumps({"cpu_seconds": cpu, "memory_bytes": peak - before, "peak_bytes": peak}))

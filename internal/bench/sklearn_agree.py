"""scikit-learn's labels and core flags of many small cases: CASES POINTS LABELS (see agree.go)."""
import json
import sys

import numpy as np
from sklearn.cluster import DBSCAN

cases_file, points_file, labels_file = sys.argv[1:]
points = np.fromfile(points_file, dtype="<f8")
at = 0
with open(cases_file) as cases, open(labels_file, "wb") as out:
    for case in json.load(cases):
        size = case["n"] * case["dims"]
        rows = points[at : at + size].reshape(-1, case["dims"])
        at += size
        model = DBSCAN(eps=case["eps"], min_samples=case["min_samples"], algorithm="kd_tree", n_jobs=1).fit(rows)
        core = np.zeros(len(rows), dtype=np.uint8)
        core[model.core_sample_indices_] = 1
        out.write(model.labels_.astype("<i4").tobytes())
        out.write(core.tobytes())

package dbscan

import (
	"cmp"
	"slices"
)

// sweep labels points without a grid: sorted along their widest axis, each is
// compared with those that follow within eps on that axis. It serves data whose
// cells cannot be numbered in 64 bits: many points in three or four dimensions,
// spread over more than 2¹⁶ cells on some axis. They are then so sparse along
// that axis that few are compared; the worst case is quadratic.
func sweep(points []float64, dims int, eps float64, minSamples int, res *Result) {
	n := len(points) / dims
	pts := make([]point, n)
	for i := range pts {
		copy(pts[i][:dims], points[i*dims:])
	}
	all := boxOf(pts)
	axis, _ := all.widest()
	order := make([]int32, n)
	for i := range order {
		order[i] = int32(i)
	}
	slices.SortFunc(order, func(a, b int32) int { return cmp.Compare(pts[a][axis], pts[b][axis]) })

	// eachPair visits every pair of different points within eps once.
	eps2 := square(eps)
	eachPair := func(visit func(a, b int32)) {
		for i, a := range order {
			for _, b := range order[i+1:] {
				if square(pts[b][axis]-pts[a][axis]) > eps2 {
					break
				}
				if dist2(&pts[a], &pts[b]) <= eps2 {
					visit(a, b)
				}
			}
		}
	}

	inReach := make([]int32, n)
	eachPair(func(a, b int32) { inReach[a]++; inReach[b]++ })
	for i := range res.Core {
		res.Core[i] = int(inReach[i])+1 >= minSamples
	}

	// The root of a tree is its smallest row, so that roots met in input order
	// number the clusters.
	parent := make([]int32, n)
	for i := range parent {
		parent[i] = int32(i)
	}
	root := func(i int32) int32 {
		for parent[i] != i {
			parent[i] = parent[parent[i]]
			i = parent[i]
		}
		return i
	}
	eachPair(func(a, b int32) {
		if res.Core[a] && res.Core[b] {
			ra, rb := root(a), root(b)
			parent[max(ra, rb)] = min(ra, rb)
		}
	})
	for i := range parent {
		if !res.Core[i] {
			continue
		}
		if r := root(int32(i)); r == int32(i) {
			res.Labels[i] = int32(res.Clusters)
			res.Clusters++
		} else {
			res.Labels[i] = res.Labels[r]
		}
	}

	lowest := func(border, core int32) {
		if res.Core[core] && !res.Core[border] {
			if l := &res.Labels[border]; *l == Noise || *l > res.Labels[core] {
				*l = res.Labels[core]
			}
		}
	}
	eachPair(func(a, b int32) { lowest(a, b); lowest(b, a) })
}

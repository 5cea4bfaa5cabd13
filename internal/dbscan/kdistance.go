package dbscan

import "math"

// KDistances returns, of each point in of, the distance to its kth nearest
// neighbour, itself included as in min_samples, so k = 1 gives 0. Where there are
// fewer than k points it is +Inf. Sorted, they are the k-distance plot by which
// eps is chosen (M. Ester, H.-P. Kriegel, J. Sander, X. Xu, "A Density-Based
// Algorithm for Discovering Clusters", KDD 1996, section 4.2): points of clusters
// have small ones, noise has large ones, and eps belongs between.
//
// points holds dims coordinates for each point, as for Cluster. It compares each
// point of of with all others, and keeps k of them.
func KDistances(points []float64, dims, k int, of []int) []float64 {
	out := make([]float64, len(of))
	nearest := make([]float64, 0, k) // squares, ascending
	for i, p := range of {
		nearest = nearest[:0]
		a := points[p*dims : (p+1)*dims]
		for q := 0; q < len(points); q += dims {
			d := 0.0
			for j, x := range points[q : q+dims] {
				d += (x - a[j]) * (x - a[j])
			}
			if len(nearest) == k {
				if d >= nearest[k-1] {
					continue
				}
				nearest = nearest[:k-1]
			}
			nearest = append(nearest, d)
			for j := len(nearest) - 1; j > 0 && nearest[j] < nearest[j-1]; j-- {
				nearest[j], nearest[j-1] = nearest[j-1], nearest[j]
			}
		}
		out[i] = math.Inf(1)
		if len(nearest) == k {
			out[i] = math.Sqrt(nearest[k-1])
		}
	}
	return out
}

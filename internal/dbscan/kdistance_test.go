package dbscan

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestKDistancesAreThoseOfASortedList(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for dims := 1; dims <= MaxDims; dims++ {
		points := make([]float64, 60*dims)
		for i := range points {
			points[i] = float64(rng.IntN(6)) // many ties
		}
		of := []int{0, 7, 59}
		for _, k := range []int{1, 2, 5, 60, 61} {
			got := KDistances(points, dims, k, of)
			for i, p := range of {
				var all []float64
				for q := range 60 {
					d := 0.0
					for j := range dims {
						d += (points[q*dims+j] - points[p*dims+j]) * (points[q*dims+j] - points[p*dims+j])
					}
					all = append(all, math.Sqrt(d))
				}
				slices.Sort(all)
				want := math.Inf(1)
				if k <= 60 {
					want = all[k-1]
				}
				assert.Equal(t, want, got[i], "%d axes, k %d, point %d", dims, k, p)
			}
		}
	}
}

// A point is core exactly where its k-distance is at most eps: what the
// distribution shows below a value is what that value makes core.
func TestCorePointsAreThoseWithinTheirKDistance(t *testing.T) {
	rng := rand.New(rand.NewPCG(2, 1))
	points := make([]float64, 2*500)
	of := make([]int, 500)
	for i := range of {
		of[i] = i
		points[2*i], points[2*i+1] = rng.NormFloat64(), rng.NormFloat64()
	}
	const eps, k = 0.2, 7
	result, err := Cluster(points, 2, eps, k)
	require.NoError(t, err)
	cores := 0
	for i, d := range KDistances(points, 2, k, of) {
		assert.Equal(t, result.Core[i], d <= eps, "point %d", i)
		if d <= eps {
			cores++
		}
	}
	assert.Positive(t, cores)
	assert.Less(t, cores, 500)
}

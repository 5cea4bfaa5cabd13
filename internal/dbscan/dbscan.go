package dbscan

import (
	"errors"
	"fmt"
	"math"
)

// MaxDims is the largest number of axes a point can have.
const MaxDims = 4

// Noise is the label of a point that belongs to no cluster.
const Noise = int32(-1)

// What Cluster, Window.Add and Window.Step refuse. The errors they return wrap
// one of these and name the value and where it stands.
var (
	// ErrDims: dims outside 1..MaxDims, or coordinates that are no whole number of points.
	ErrDims = errors.New("wrong number of dimensions")
	// ErrEps: eps is not a positive number whose square a float64 can hold.
	ErrEps = errors.New("eps out of range")
	// ErrMinSamples: minSamples below 1.
	ErrMinSamples = errors.New("min_samples out of range")
	// ErrNotFinite: a coordinate is NaN or infinite.
	ErrNotFinite = errors.New("coordinate is not finite")
	// ErrTooMany: more points than labels can be counted in 32 bits.
	ErrTooMany = errors.New("too many points")
)

// The square of eps must neither vanish nor overflow, with room for rounding.
const (
	minEps = 1e-150
	maxEps = 1e150
)

// Result is a labelling; index i speaks of the i-th point of the input.
type Result struct {
	// Labels holds the cluster of each point, 0 to Clusters-1, or Noise.
	Labels []int32
	// Core tells which points are core points.
	Core []bool
	// Clusters is the number of clusters.
	Clusters int
	// Approximate tells that the work budget was spent: see Cluster.
	Approximate bool
}

// Cluster labels points, given row by row with dims coordinates each and
// already scaled, so that one eps serves all axes. points is not changed.
//
// dims is 1 to MaxDims, eps 1e-150 to 1e150 in scaled units, minSamples at
// least 1. No points are no clusters, and no error.
//
// Time grows as n log n for data as it comes, and memory is about 100 bytes a
// point. There are layouts made for the purpose, such as two shells that are
// nowhere quite eps apart, that would take thousands of comparisons a point.
// There the work ends at a budget, and the answer is approximate: points that
// belong together are together, but clusters less than three eps apart may be
// one; see Result.Approximate.
func Cluster(points []float64, dims int, eps float64, minSamples int) (Result, error) {
	if err := checkParams(dims, eps, minSamples); err != nil {
		return Result{}, err
	}
	if len(points)%dims != 0 {
		return Result{}, fmt.Errorf("%w: %d coordinates are no whole number of points of %d", ErrDims, len(points), dims)
	}
	n := len(points) / dims
	if n > math.MaxInt32 {
		return Result{}, fmt.Errorf("%w: %d, at most %d", ErrTooMany, n, math.MaxInt32)
	}
	for i, x := range points {
		if !finite(x) {
			return Result{}, fmt.Errorf("%w: point %d, axis %d is %v", ErrNotFinite, i/dims, i%dims, x)
		}
	}

	res := Result{Labels: make([]int32, n), Core: make([]bool, n)}
	if n == 0 {
		return res, nil
	}
	g, ok := gridOf(points, dims, eps, minSamples)
	if !ok {
		for i := range res.Labels {
			res.Labels[i] = Noise
		}
		sweep(points, dims, eps, minSamples, &res)
		return res, nil
	}
	g.refill(n)
	g.cluster(&res)
	return res, nil
}

// cluster labels all points of the grid into res.
func (g *grid) cluster(res *Result) {
	g.startWalks()
	for i := range g.slabs {
		g.findCores(i)
	}
	g.joinAll(func(int) bool { return true })
	res.Clusters = g.number()
	g.startWalks()
	for i, s := range g.slabs {
		g.findBorders(i, true)
		labels, core := g.labelsOf(i)
		for p, row := range s.row {
			res.Labels[row], res.Core[row] = labels[p], core[p]
		}
		s.borders = nil
		res.Approximate = res.Approximate || s.approximate
	}
}

func checkParams(dims int, eps float64, minSamples int) error {
	switch {
	case dims < 1 || dims > MaxDims:
		return fmt.Errorf("%w: %d, must be 1 to %d", ErrDims, dims, MaxDims)
	case !(eps >= minEps && eps <= maxEps): // NaN too
		return fmt.Errorf("%w: %v, must be %v to %v", ErrEps, eps, minEps, maxEps)
	case minSamples < 1:
		return fmt.Errorf("%w: %d, must be at least 1", ErrMinSamples, minSamples)
	}
	return nil
}

func finite(x float64) bool { return x-x == 0 }

// point is a position padded with zeros to MaxDims axes. A zero axis adds an
// exact 0 to a squared distance, so one code path serves every number of axes.
type point [MaxDims]float64

// dist2 is the squared distance, summed in axis order. The conversions keep the
// compiler from fusing a multiplication with an addition: fused, a distance
// that equals eps could come out above it, and differently on each machine.
func dist2(a, b *point) float64 {
	x, y, z, w := a[0]-b[0], a[1]-b[1], a[2]-b[2], a[3]-b[3]
	return float64(x*x) + float64(y*y) + float64(z*z) + float64(w*w)
}

// square rounds x*x on its own, for the reason given at dist2.
func square(x float64) float64 { return float64(x * x) }

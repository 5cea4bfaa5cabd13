package dbscan

import (
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/dbscan/dbscantest"
)

// reference is DBSCAN as defined, by comparing all pairs. It shares no code
// with the package.
func reference(points []float64, dims int, eps float64, minSamples int) Result {
	n := len(points) / dims
	near := func(a, b int) bool {
		sum := 0.0
		for k := range dims {
			d := points[a*dims+k] - points[b*dims+k]
			sum += float64(d * d)
		}
		return sum <= float64(eps*eps)
	}
	res := Result{Labels: make([]int32, n), Core: make([]bool, n)}
	for a := range n {
		res.Labels[a] = -1
		count := 0
		for b := range n {
			if near(a, b) {
				count++
			}
		}
		res.Core[a] = count >= minSamples
	}
	for a := range n {
		if !res.Core[a] || res.Labels[a] >= 0 {
			continue
		}
		todo := []int{a}
		res.Labels[a] = int32(res.Clusters)
		for len(todo) > 0 {
			x := todo[0]
			todo = todo[1:]
			for b := range n {
				if res.Labels[b] < 0 && near(x, b) {
					res.Labels[b] = int32(res.Clusters)
					if res.Core[b] {
						todo = append(todo, b)
					}
				}
			}
		}
		res.Clusters++
	}
	return res
}

type caseFile struct {
	Name       string
	File       string
	Labels     string
	Expected   string
	Scales     []float64
	Eps        float64
	MinSamples int `json:"min_samples"`
	N, D       int
	Clusters   int
	Noise      int
	WindowS    float64 `json:"window_s"`
}

func manifest(tb testing.TB) (cases, streams []caseFile) {
	tb.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", "open", "manifest.json"))
	require.NoError(tb, err)
	var m struct{ Cases, Streams []caseFile }
	require.NoError(tb, json.Unmarshal(b, &m))
	require.NotEmpty(tb, m.Cases)
	require.NotEmpty(tb, m.Streams)
	return m.Cases, m.Streams
}

// readCSV returns the numbers of a file of testdata/open, row by row.
func readCSV(tb testing.TB, name string, columns int) []float64 {
	tb.Helper()
	f, err := os.Open(filepath.Join("testdata", "open", name))
	require.NoError(tb, err)
	defer f.Close()
	r := csv.NewReader(f)
	r.FieldsPerRecord = columns
	_, err = r.Read() // header
	require.NoError(tb, err)
	var out []float64
	for {
		rec, err := r.Read()
		if errors.Is(err, io.EOF) {
			return out
		}
		require.NoError(tb, err)
		for _, s := range rec {
			x, err := strconv.ParseFloat(s, 64)
			require.NoError(tb, err)
			out = append(out, x)
		}
	}
}

func (c *caseFile) points(tb testing.TB) []float64 {
	tb.Helper()
	pts := readCSV(tb, c.File, len(c.Scales))
	for i := range pts {
		pts[i] /= c.Scales[i%len(c.Scales)]
	}
	return pts
}

func TestLabelsEqualReferenceCasesToTheLetter(t *testing.T) {
	cases, _ := manifest(t)
	for _, c := range cases {
		t.Run(c.Name, func(t *testing.T) {
			points := c.points(t)
			require.Len(t, points, c.N*c.D)
			var want Result
			for i, x := range readCSV(t, c.Labels, 2) {
				if i%2 == 0 {
					want.Labels = append(want.Labels, int32(x))
				} else {
					want.Core = append(want.Core, x == 1)
				}
			}
			want.Clusters = c.Clusters

			got, err := Cluster(points, c.D, c.Eps, c.MinSamples)
			require.NoError(t, err)
			assert.Equal(t, want, got)
			assert.Equal(t, c.Noise, count(got.Labels, Noise))
			assert.Equal(t, want, bySweep(points, c.D, c.Eps, c.MinSamples))
			assert.Equal(t, want, reference(points, c.D, c.Eps, c.MinSamples), "the reference itself")
		})
	}
}

func count[T comparable](s []T, x T) int {
	n := 0
	for _, y := range s {
		if y == x {
			n++
		}
	}
	return n
}

func bySweep(points []float64, dims int, eps float64, minSamples int) Result {
	n := len(points) / dims
	res := Result{Labels: slices.Repeat([]int32{Noise}, n), Core: make([]bool, n)}
	if n > 0 {
		sweep(points, dims, eps, minSamples, &res)
	}
	return res
}

func TestMinSamplesCountsThePointItselfAndEpsIsWithin(t *testing.T) {
	row := []float64{0, 2, 3, 4, 6, 8, 10}
	for _, tc := range []struct {
		minSamples int
		labels     []int32
		core       []int // indices
	}{
		{1, []int32{0, 1, 1, 1, 2, 3, 4}, []int{0, 1, 2, 3, 4, 5, 6}},
		{2, []int32{-1, 0, 0, 0, -1, -1, -1}, []int{1, 2, 3}},
		{3, []int32{-1, 0, 0, 0, -1, -1, -1}, []int{2}},
		{4, []int32{-1, -1, -1, -1, -1, -1, -1}, nil},
		{math.MaxInt, []int32{-1, -1, -1, -1, -1, -1, -1}, nil},
	} {
		t.Run(fmt.Sprint("min_samples ", tc.minSamples), func(t *testing.T) {
			got, err := Cluster(row, 1, 1, tc.minSamples)
			require.NoError(t, err)
			assert.Equal(t, tc.labels, got.Labels)
			for i, core := range got.Core {
				assert.Equal(t, slices.Contains(tc.core, i), core, "point %d", i)
			}
		})
	}
}

func TestBorderPointTakesSmallestClusterInReach(t *testing.T) {
	// The cluster on the right comes first in the input, so it is number 0.
	points := []float64{3, 3.2, 3.4, 1, 1.2, 1.4, 2.2}
	got, err := Cluster(points, 1, 0.85, 4)
	require.NoError(t, err)
	assert.Equal(t, reference(points, 1, 0.85, 4), got)
	assert.Equal(t, []int32{0, 0, 0, 1, 1, 1, 0}, got.Labels)
	assert.False(t, got.Core[6])
}

func TestNoPointsAreNoClusters(t *testing.T) {
	for dims := 1; dims <= MaxDims; dims++ {
		got, err := Cluster(nil, dims, 1, 1)
		require.NoError(t, err)
		assert.Empty(t, got.Labels)
		assert.Empty(t, got.Core)
		assert.Zero(t, got.Clusters)
	}
}

func TestBadInputIsRefused(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for _, tc := range []struct {
		name       string
		points     []float64
		dims       int
		eps        float64
		minSamples int
		want       error
		says       string
	}{
		{"no axes", nil, 0, 1, 1, ErrDims, "1 to 4"},
		{"negative axes", nil, -1, 1, 1, ErrDims, "-1"},
		{"too many axes", make([]float64, 5), 5, 1, 1, ErrDims, "1 to 4"},
		{"half a point", make([]float64, 5), 2, 1, 1, ErrDims, "5 coordinates"},
		{"eps zero", nil, 1, 0, 1, ErrEps, "0"},
		{"eps negative", nil, 1, -1, 1, ErrEps, "-1"},
		{"eps NaN", nil, 1, nan, 1, ErrEps, "NaN"},
		{"eps infinite", nil, 1, inf, 1, ErrEps, "Inf"},
		{"eps squared vanishes", nil, 1, 1e-170, 1, ErrEps, "1e-170"},
		{"eps squared overflows", nil, 1, 1e170, 1, ErrEps, "1e+170"},
		{"min_samples zero", nil, 1, 1, 0, ErrMinSamples, "0"},
		{"min_samples negative", nil, 1, 1, -3, ErrMinSamples, "-3"},
		{"NaN", []float64{1, 2, 3, nan}, 2, 1, 1, ErrNotFinite, "point 1, axis 1"},
		{"infinite", []float64{1, 2, inf, 4}, 2, 1, 1, ErrNotFinite, "point 1, axis 0"},
		{"minus infinite", []float64{-inf}, 1, 1, 1, ErrNotFinite, "point 0, axis 0"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := Cluster(tc.points, tc.dims, tc.eps, tc.minSamples)
			require.ErrorIs(t, err, tc.want)
			assert.ErrorContains(t, err, tc.says)
			assert.Zero(t, got)
		})
	}
}

// layouts draw points that are hard in one way each; coordinates in units of
// about eps.
var layouts = map[string]func(r *rand.Rand) float64{
	"uniform":          func(r *rand.Rand) float64 { return r.Float64() * 8 },
	"clumped":          func(r *rand.Rand) float64 { return float64(r.IntN(3))*2.5 + r.NormFloat64()*0.3 },
	"whole numbers":    func(r *rand.Rand) float64 { return float64(r.IntN(6)) },
	"halves":           func(r *rand.Rand) float64 { return float64(r.IntN(12)) / 2 },
	"tenths":           func(r *rand.Rand) float64 { return float64(r.IntN(40)) / 10 },
	"negative":         func(r *rand.Rand) float64 { return -float64(r.IntN(40)) / 8 },
	"far from origin":  func(r *rand.Rand) float64 { return 1e9 + float64(r.IntN(40))/8 },
	"coarser than eps": func(r *rand.Rand) float64 { return 1e16 + 2*float64(r.IntN(5)) },
	"one outlier in 8": func(r *rand.Rand) float64 {
		return float64(r.IntN(12))/2 + float64(r.IntN(8)/7)*1e6*float64(r.IntN(3))
	},
	"enormous":   func(r *rand.Rand) float64 { return math.Ldexp(float64(r.IntN(5)-2), r.IntN(1022)) },
	"very large": func(r *rand.Rand) float64 { return math.Ldexp(float64(r.IntN(5)-2), r.IntN(60)) },
	"all alike": func(*rand.Rand) float64 {
		return 0.1
	},
}

func TestFastPathEqualsDefinition(t *testing.T) {
	for name, draw := range layouts {
		t.Run(name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(1, 2))
			for range 300 {
				dims := 1 + r.IntN(MaxDims)
				points := make([]float64, dims*r.IntN(120))
				for i := range points {
					points[i] = draw(r)
				}
				eps := []float64{0.5, 0.7, 1, math.Sqrt2, math.Sqrt(3), 2}[r.IntN(6)]
				minSamples := 1 + r.IntN(8)
				requireExact(t, points, dims, eps, minSamples)
			}
		})
	}
}

func requireExact(t *testing.T, points []float64, dims int, eps float64, minSamples int) {
	t.Helper()
	input := slices.Clone(points)
	want := reference(points, dims, eps, minSamples)
	got, err := Cluster(points, dims, eps, minSamples)
	require.NoError(t, err)
	require.Equal(t, want, got, "%d axes, eps %v, min_samples %d: %v", dims, eps, minSamples, points)
	require.Equal(t, want, bySweep(points, dims, eps, minSamples), "sweep: %d axes, eps %v, min_samples %d: %v", dims, eps, minSamples, points)
	require.Equal(t, input, points, "input changed")
}

// Pairs of points, each pair far from all others on every axis, 17 bits' worth
// of cells on each of four axes even with the gaps shortened.
func TestDataTooWideForTheGridIsStillExact(t *testing.T) {
	const pairs = 17000
	r := rand.New(rand.NewPCG(5, 6))
	var orders [MaxDims][]int
	for k := range orders {
		orders[k] = r.Perm(pairs)
	}
	var points []float64
	for i := range pairs {
		var p [MaxDims]float64
		for k := range p {
			p[k] = float64(orders[k][i]) * 1e6
		}
		points = append(points, p[:]...)
		p[r.IntN(MaxDims)]++
		points = append(points, p[:]...)
	}
	_, ok := gridOf(points, MaxDims, 1, 2)
	require.False(t, ok, "the data does fit the grid")

	got, err := Cluster(points, MaxDims, 1, 2)
	require.NoError(t, err)
	assert.Equal(t, pairs, got.Clusters)
	for i, label := range got.Labels {
		require.Equal(t, int32(i/2), label)
		require.True(t, got.Core[i])
	}
}

// Cells on both sides of which the answer flips: points exactly eps apart along
// each axis and each diagonal, at places where cell borders round differently.
func TestPointsExactlyEpsApartAcrossCellBorders(t *testing.T) {
	for dims := 1; dims <= MaxDims; dims++ {
		diagonal := math.Sqrt(float64(dims))
		for _, side := range []float64{1, 0.1, 1.0 / 3, 1e-5, 12345.678} {
			var points []float64
			for step := range 60 {
				for k := range dims {
					p := make([]float64, dims)
					p[k] = float64(step) * side
					points = append(points, p...)
				}
				points = append(points, slices.Repeat([]float64{float64(step) * side}, dims)...)
			}
			for _, eps := range []float64{side, math.Nextafter(side, 0), side * diagonal, math.Nextafter(side*diagonal, 0)} {
				for _, minSamples := range []int{1, 3, 5} {
					requireExact(t, points, dims, eps, minSamples)
				}
			}
		}
	}
}

// Two points at the facing corners of cells that are only just in reach of each
// other, with a third at the origin that fixes where cells begin.
func TestPointsInTheFarthestCellsInReach(t *testing.T) {
	for dims := 1; dims <= MaxDims; dims++ {
		side := 1 / math.Sqrt(float64(dims))
		inner := side * (1 - 1.5e-9) // still in the first cell, and inner+side in the third
		diagonal := make([]float64, 3*dims)
		for k := range dims {
			diagonal[dims+k], diagonal[2*dims+k] = inner, inner+side
		}
		requireExact(t, diagonal, dims, 1, 2)
		requireExact(t, diagonal, dims, math.Nextafter(1, 2), 2)
		for k := range dims {
			along := make([]float64, 3*dims)
			along[dims+k], along[2*dims+k] = inner, inner+1
			requireExact(t, along, dims, 1, 2)
			requireExact(t, along, dims, math.Nextafter(1, 2), 2)
		}
	}
}

// A cell's diagonal must stay below eps as computed: points a few ulp to either
// side of eps apart along a diagonal must not be taken for cell mates.
func TestPointsAcrossACellAreComparedAsComputed(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for range 5000 {
		dims := 1 + r.IntN(MaxDims)
		eps := r.Float64() + 0.5
		points := make([]float64, 2*dims)
		for k := range dims {
			x := eps / math.Sqrt(float64(dims))
			for range r.IntN(4) {
				x = math.Nextafter(x, float64(2*r.IntN(2)))
			}
			points[dims+k] = x
		}
		requireExact(t, points, dims, eps, 2)
	}
}

// Far from the point where counting cells begins, rounding moves the border of a
// cell by more than coordinates differ. Each pair begins about where a cell does
// and ends a few ulp within eps or without.
func TestCellBordersFarFromTheOrigin(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	const pairs = 20000
	for _, eps := range []float64{1, 0.7, 0.9, 1.9} {
		const lo, hi = -2e9, 1e6
		side := cellSide(1, eps, (hi-lo)/cellSide(1, eps, 0))
		points := []float64{lo, hi}
		want := []int32{Noise, Noise}
		clusters := int32(0)
		for i := range pairs {
			ulps := func(x float64) float64 {
				toward := 1e10 * float64(r.IntN(2))
				for range r.IntN(4) {
					x = math.Nextafter(x, toward)
				}
				return x
			}
			x := lo + side*float64(int((1000-lo)/side)+16*i) + (r.Float64()-0.5)*1e-6
			y := ulps(x + eps)
			points = append(points, x, y)
			if y-x <= eps {
				want = append(want, clusters, clusters)
				clusters++
			} else {
				want = append(want, Noise, Noise)
			}
		}
		require.Positive(t, clusters)
		require.Less(t, clusters, int32(pairs))
		got, err := Cluster(points, 1, eps, 2)
		require.NoError(t, err)
		for i := range want {
			require.Equal(t, want[i], got.Labels[i], "eps %v, point %d at %v", eps, i, points[i])
		}
	}
}

func TestBoxesOneUlpLongAreSplit(t *testing.T) {
	for start := range 4 {
		var points []float64
		for place := range 10 {
			points = append(points, slices.Repeat([]float64{1e16 + 2*float64(start+place)}, 20)...)
		}
		for _, eps := range []float64{1, 2, 3, 4, 5} {
			requireExact(t, points, 1, eps, 3)
		}
	}
}

func TestDistancesAreSummedInAxisOrder(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	matters := 0
	for range 20000 {
		x, y, z := r.Float64(), r.Float64(), r.Float64()
		inOrder := float64(x*x) + float64(y*y) + float64(z*z)
		reversed := float64(z*z) + float64(y*y) + float64(x*x)
		eps := math.Sqrt(inOrder)
		if inOrder == reversed || eps*eps != min(inOrder, reversed) {
			continue
		}
		matters++
		requireExact(t, []float64{0, 0, 0, x, y, z}, 3, eps, 2)
	}
	require.Greater(t, matters, 100)
}

func TestMakeGivesDataThatTheReferenceAgreesOn(t *testing.T) {
	for kind := range dbscantest.Kinds {
		s := dbscantest.Make(kind, 2000, 1)
		require.Len(t, s.Points, 2000*s.Dims)
		require.Equal(t, s, dbscantest.Make(kind, 2000, 1), "%s is not the same each time", kind)
		requireExact(t, s.Points, s.Dims, s.Eps, s.MinSamples)
	}
}

// FuzzCluster reads parameters and then coordinates from the input, coarse
// enough that ties and duplicates are common.
func FuzzCluster(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0, 1, 2, 3, 4, 5})
	f.Add([]byte{2, 3, 4, 1, 0, 0, 0, 255, 255, 255, 0, 0, 1, 0, 1, 0})
	f.Add([]byte{3, 5, 1, 2, 1, 2, 3, 4, 1, 2, 3, 5, 128, 0, 0, 0})
	f.Add([]byte{1, 1, 2, 3, 10, 200, 11, 201, 12, 202, 13, 203})
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) < 4 {
			return
		}
		dims := 1 + int(in[0])%MaxDims
		eps := []float64{1, 2, 0.8, math.Sqrt2, math.Sqrt(3), math.Sqrt(5), 0.1, 7}[in[1]%8]
		minSamples := 1 + int(in[2])%16
		place := []func(b byte) float64{
			func(b byte) float64 { return float64(b) },
			func(b byte) float64 { return float64(b) / 10 },
			func(b byte) float64 { return float64(int8(b)) * eps / math.Sqrt(float64(dims)) },
			func(b byte) float64 { return math.Ldexp(float64(int8(b)), 8*int(b%8)) }, // a few far away
			func(b byte) float64 { return 1e15 + float64(b)/8 },
			func(b byte) float64 { return float64(b%16)*eps + math.Ldexp(float64(b/16), -50) },
		}[in[3]%6]
		data := in[4:]
		data = data[:min(len(data), 200*dims)]
		points := make([]float64, len(data)/dims*dims)
		for i := range points {
			points[i] = place(data[i])
		}
		requireExact(t, points, dims, eps, minSamples)
	})
}

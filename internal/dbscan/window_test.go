package dbscan

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// answer is all that a step says.
type answer struct {
	Snapshot
	Points []Labelled // by id
}

func stepTo(tb testing.TB, w *Window, end float64) answer {
	tb.Helper()
	snap, err := w.Step(end)
	require.NoError(tb, err)
	a := answer{snap, slices.Collect(w.Labels())}
	slices.SortFunc(a.Points, func(p, q Labelled) int { return cmp.Compare(p.ID, q.ID) })
	return a
}

// wantAnswer computes an answer from nothing but Cluster. Ids must rise.
func wantAnswer(tb testing.TB, ids []uint64, points []float64, dims int, start, end, eps float64, minSamples int) answer {
	tb.Helper()
	var a answer
	var in []float64
	for i, id := range ids {
		if p := points[i*dims : (i+1)*dims]; start <= p[0] && p[0] < end {
			a.Points = append(a.Points, Labelled{ID: id})
			in = append(in, p...)
		}
	}
	res, err := Cluster(in, dims, eps, minSamples)
	require.NoError(tb, err)
	for i := range a.Points {
		a.Points[i].Label, a.Points[i].Core = res.Labels[i], res.Core[i]
	}
	a.Snapshot = Snapshot{Points: len(res.Labels), Core: count(res.Core, true), Noise: count(res.Labels, Noise), Clusters: res.Clusters}
	return a
}

func TestWindowMatchesReferenceStream(t *testing.T) {
	_, streams := manifest(t)
	for _, s := range streams {
		points := s.points(t)
		want := readCSV(t, s.Expected, 7)
		require.NotEmpty(t, want)

		w := NewWindow(3, s.WindowS/s.Scales[0], s.Eps, s.MinSamples)
		next := 0
		for row := 0; row < len(want); row += 7 {
			end := want[row] / s.Scales[0]
			for ; next < s.N && points[next*3] < end; next++ {
				require.NoError(t, w.Add(uint64(next), points[next*3:next*3+3]))
			}
			snap := stepTo(t, w, end)
			cores := make([]float64, snap.Clusters)
			sizes := make([]float64, snap.Clusters)
			var noise, core, sumSq float64
			for _, p := range snap.Points {
				switch {
				case p.Label == Noise:
					noise++
					continue
				case p.Core:
					core++
					cores[p.Label]++
				}
				sizes[p.Label]++
			}
			for _, c := range cores {
				sumSq += c * c
			}
			got := []float64{want[row], float64(len(snap.Points)), float64(snap.Clusters), noise, core, sumSq, slices.Max(sizes)}
			require.Equal(t, want[row:row+7], got)
		}
	}
}

func TestWindowEqualsFullRunAtEveryStep(t *testing.T) {
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 3))
		dims := 1 + r.IntN(MaxDims)
		width := []float64{3, 7.5, 20}[r.IntN(3)]
		eps := []float64{0.5, 0.8, 1.5}[r.IntN(3)]
		minSamples := 1 + r.IntN(6)
		w := NewWindow(dims, width, eps, minSamples)

		var ids []uint64
		var points []float64
		end := float64(r.IntN(100)) - 50
		for range 40 {
			end += []float64{0, 0.25, 0.5, 1, 2.5, 30}[r.IntN(6)]
			for range r.IntN(40) {
				p := make([]float64, dims)
				for k := range p {
					p[k] = float64(r.IntN(16)) / 4
				}
				// Late, early and on the edges.
				p[0] = end - float64(r.IntN(int(width)*4+8))/4 + 1
				id := uint64(len(ids))
				err := w.Add(id, p)
				if p[0] < w.start {
					require.ErrorIs(t, err, ErrExpired)
					continue
				}
				require.NoError(t, err)
				ids, points = append(ids, id), append(points, p...)
			}
			if r.IntN(4) == 0 {
				minSamples = 1 + r.IntN(6)
				require.NoError(t, w.SetMinSamples(minSamples))
			}
			got := stepTo(t, w, end)
			want := wantAnswer(t, ids, points, dims, end-width, end, eps, minSamples)
			require.Equal(t, want, got, "seed %d, end %v", seed, end)
		}
	}
}

func TestWindowIsHalfOpen(t *testing.T) {
	w := NewWindow(1, 10, 1, 1)
	for id, at := range []float64{0, 5, 10, 15} {
		require.NoError(t, w.Add(uint64(id), []float64{at}))
	}
	in := func(end float64) (ids []uint64) {
		for _, p := range stepTo(t, w, end).Points {
			ids = append(ids, p.ID)
		}
		return ids
	}
	assert.Equal(t, []uint64{0, 1}, in(10), "the end is outside")
	assert.Equal(t, []uint64{1, 2}, in(15), "so is what is older than the width, and what comes later waits")
	assert.Equal(t, []uint64{1, 2}, in(15), "a step in place changes nothing")
	assert.Equal(t, []uint64{2, 3}, in(20), "a point at the start is inside")
	assert.Empty(t, in(1000))
	assert.Zero(t, w.Len())
}

func TestWindowGivesIDsBack(t *testing.T) {
	w := NewWindow(2, 10, 1, 2)
	require.NoError(t, w.Add(7, []float64{3, 0}))
	require.NoError(t, w.Add(7, []float64{1, 0}))
	require.NoError(t, w.Add(math.MaxUint64, []float64{3.5, 0}))
	snap, err := w.Step(5)
	require.NoError(t, err)
	assert.Equal(t, Snapshot{Points: 3, Core: 2, Noise: 1, Clusters: 1}, snap)
	assert.ElementsMatch(t, []Labelled{
		{ID: 7, Label: 0, Core: true}, {ID: 7, Label: Noise}, {ID: math.MaxUint64, Label: 0, Core: true},
	}, slices.Collect(w.Labels()))
}

func TestWindowCopiesWhatItIsGiven(t *testing.T) {
	w := NewWindow(1, 10, 1, 1)
	p := []float64{1}
	require.NoError(t, w.Add(1, p))
	p[0] = math.NaN()
	snap, err := w.Step(5)
	require.NoError(t, err)
	assert.Equal(t, 1, snap.Points)
}

func TestWindowFollowsItsPointsAndMinSamples(t *testing.T) {
	w := NewWindow(1, 10, 1, 2)
	require.NoError(t, w.Add(1, []float64{4}))
	require.NoError(t, w.Add(2, []float64{4.5}))
	require.Equal(t, []Labelled{{1, 0, true}, {2, 0, true}}, stepTo(t, w, 10).Points)

	require.NoError(t, w.Add(3, []float64{11}))
	require.Equal(t, []Labelled{{1, 0, true}, {2, 0, true}}, stepTo(t, w, 10.5).Points, "a point after the window changes nothing yet")
	require.NoError(t, w.SetMinSamples(3))
	require.Equal(t, []Labelled{{1, Noise, false}, {2, Noise, false}}, stepTo(t, w, 10.5).Points)
	require.NoError(t, w.Add(4, []float64{5}))
	require.Equal(t, []Labelled{{1, 0, true}, {2, 0, true}, {4, 0, true}}, stepTo(t, w, 10.5).Points, "a late point")
	require.Len(t, stepTo(t, w, 12).Points, 4, "the point that waited")
	require.Len(t, stepTo(t, w, 14.2).Points, 3, "one expired")
}

func TestWindowRefusesBadInputAndLosesNothingElse(t *testing.T) {
	w := NewWindow(2, 10, 1, 1)
	require.NoError(t, w.Add(1, []float64{1, 1}))
	require.NoError(t, w.Add(2, []float64{12, 1}))
	_, err := w.Step(11)
	require.NoError(t, err)

	require.ErrorIs(t, w.Add(3, []float64{1}), ErrDims)
	require.ErrorIs(t, w.Add(4, []float64{5, math.NaN()}), ErrNotFinite)
	require.ErrorIs(t, w.Add(5, []float64{math.Inf(1), 0}), ErrNotFinite)
	require.ErrorIs(t, w.Add(6, []float64{0.5, 0}), ErrExpired)
	require.ErrorIs(t, w.SetMinSamples(0), ErrMinSamples)
	_, err = w.Step(10)
	require.ErrorIs(t, err, ErrBackwards)
	_, err = w.Step(math.NaN())
	require.ErrorIs(t, err, ErrNotFinite)

	assert.Equal(t, []Labelled{{ID: 1, Core: true}}, stepTo(t, w, 11).Points)
	assert.Equal(t, 2, w.Len())
}

func TestWindowWithBadArgumentsSaysSo(t *testing.T) {
	for _, tc := range []struct {
		w    *Window
		want error
	}{
		{NewWindow(0, 1, 1, 1), ErrDims},
		{NewWindow(1, 0, 1, 1), ErrWidth},
		{NewWindow(1, math.Inf(1), 1, 1), ErrWidth},
		{NewWindow(1, math.NaN(), 1, 1), ErrWidth},
		{NewWindow(1, 1, 0, 1), ErrEps},
		{NewWindow(1, 1, 1, 0), ErrMinSamples},
	} {
		require.ErrorIs(t, tc.w.Add(1, []float64{1}), tc.want)
		_, err := tc.w.Step(1)
		require.ErrorIs(t, err, tc.want)
	}
}

// stream drives a window and checks every step against a full run.
type stream struct {
	tb         testing.TB
	w          *Window
	dims       int
	width, eps float64
	minSamples int
	ids        []uint64
	points     []float64
	end        float64
}

func newStream(tb testing.TB, dims int, width, eps float64, minSamples int) *stream {
	tb.Helper()
	return &stream{tb: tb, w: NewWindow(dims, width, eps, minSamples), dims: dims, width: width, eps: eps, minSamples: minSamples}
}

func (s *stream) add(p ...float64) {
	s.tb.Helper()
	id := uint64(len(s.ids))
	if p[0] < s.w.start {
		require.ErrorIs(s.tb, s.w.Add(id, p), ErrExpired)
		return
	}
	require.NoError(s.tb, s.w.Add(id, p))
	s.ids, s.points = append(s.ids, id), append(s.points, p...)
}

func (s *stream) step(end float64) {
	s.tb.Helper()
	s.end = end
	got := stepTo(s.tb, s.w, end)
	require.Equal(s.tb, wantAnswer(s.tb, s.ids, s.points, s.dims, end-s.width, end, s.eps, s.minSamples), got, "end %v", end)
}

// Long windows over dense streams: most slabs are not looked at again, clusters
// span many of them, and lose their beginning, their end and their middle.
func TestWindowEqualsFullRunOnDenseStreams(t *testing.T) {
	for seed := range uint64(12) {
		r := rand.New(rand.NewPCG(seed, 4))
		dims := 1 + int(seed)%MaxDims
		s := newStream(t, dims, 30, 0.8, 3+r.IntN(6))
		place := func(at float64) []float64 {
			p := make([]float64, dims)
			p[0] = at
			for k := 1; k < dims; k++ {
				p[k] = []float64{3, 40}[r.IntN(2)] * r.Float64()
			}
			return p
		}
		var burst []float64
		for now := 0.0; now < 120; now += 0.7 {
			if r.IntN(10) == 0 {
				burst = place(now)
			}
			for range r.IntN(30) {
				switch late := r.IntN(12); {
				case late == 0:
					s.add(place(now - 32*r.Float64())...)
				case late == 1:
					s.add(place(now + 3*r.Float64())...)
				case burst != nil && late < 7:
					p := slices.Clone(burst)
					p[0] = now - r.Float64()
					for k := 1; k < dims; k++ {
						p[k] += 0.3 * r.NormFloat64()
					}
					s.add(p...)
				default:
					s.add(place(now - r.Float64())...)
				}
			}
			s.step(now)
		}
		require.NotNil(t, s.w.slabs)
	}
}

// The point of it all: a step looks at the slabs near the window's edges and
// near late points only.
func TestAStepLooksOnlyNearWhatChanged(t *testing.T) {
	w := NewWindow(2, 100, 1, 3)
	r := rand.New(rand.NewPCG(5, 5))
	add := func(from, to float64) {
		for range int(100 * (to - from)) {
			require.NoError(t, w.Add(0, []float64{from + (to-from)*r.Float64(), 10 * r.Float64()}))
		}
	}
	// Where a slab was looked at anew, its list of core cells was filled again.
	looked := func(end float64) (at []int64) {
		for _, s := range w.slabs.grid.slabs {
			if len(s.cores) > 0 {
				s.cores[0].first = -7
			}
		}
		_, err := w.Step(end)
		require.NoError(t, err)
		for _, s := range w.slabs.grid.slabs {
			if len(s.cores) > 0 && s.cores[0].first != -7 {
				at = append(at, s.at)
			}
		}
		return at
	}
	add(0, 100)
	_, err := w.Step(100)
	require.NoError(t, err)
	slabs := len(w.slabs.grid.slabs)
	require.Greater(t, slabs, 130)

	assert.Empty(t, looked(100), "nothing changed")
	add(100, 101)
	edges := looked(101)
	assert.NotEmpty(t, edges)
	assert.Less(t, len(edges), 15, "a second at either end is 2 slabs, and 2 on each side of them")
	require.NoError(t, w.Add(0, []float64{50, 5}))
	late := looked(101)
	assert.Len(t, late, 5)
	require.NoError(t, w.SetMinSamples(4))
	assert.Len(t, looked(101), len(w.slabs.grid.slabs), "min_samples concerns all")
}

// Points too far apart for cells are clustered all the same, and the window
// goes back to slabs when they have gone.
func TestPointsThatFitNoSlabsAreExact(t *testing.T) {
	for dims := 1; dims <= MaxDims; dims++ {
		for axis := range dims {
			s := newStream(t, dims, 10, 1, 2)
			at := func(time, far float64) []float64 {
				p := make([]float64, dims)
				p[axis] = far
				p[0] += time
				return p
			}
			s.add(at(0, 0)...)
			s.add(at(0.5, 0)...)
			s.step(5)
			require.NotNil(t, s.w.slabs)
			far := 1e17
			if axis == 0 {
				s.add(at(far, 0)...)
				s.add(at(far+64, 0)...) // the next number at all is 16 on
				s.step(6)
				s.step(far + 70) // where counting began is out of reach now
				s.step(far + 200)
				require.NotNil(t, s.w.slabs)
				continue
			}
			s.add(at(1, far)...)
			s.add(at(1.5, far)...)
			s.add(at(1, -1e300)...)
			s.add(at(1, math.Nextafter(far, 0))...)
			s.step(6)
			require.NotNil(t, s.w.flat, "%d axes, axis %d", dims, axis)
			s.add(at(2, far)...)
			s.step(8)
			s.step(11.5)
			s.add(at(7, 0.5)...)
			s.step(11.9)
			s.step(13)
			require.NotNil(t, s.w.slabs)
			require.Nil(t, s.w.flat)
			s.add(at(13, 0)...)
			s.add(at(13.5, 0.5)...)
			s.step(15)
		}
	}
}

// Rows are counted in 32 bits. When they run out, counting starts anew without
// changing their order, on which the numbering of clusters depends.
func TestRowsMayRunOut(t *testing.T) {
	for _, flat := range []bool{false, true} {
		s := newStream(t, 2, 100, 1, 2)
		s.w.nextRow = math.MaxInt32 - 20
		r := rand.New(rand.NewPCG(8, 8))
		if flat {
			s.add(1, 1e200)
		}
		for i := range 60 {
			s.add(r.Float64()*20, r.Float64()*6)
			if i%7 == 0 {
				s.step(10)
			}
		}
		s.step(30)
		require.Equal(t, flat, s.w.flat != nil)
		require.Less(t, s.w.nextRow, int32(100))
		s.step(105)
	}
}

func TestTimelessWindowMeasuresWithoutTime(t *testing.T) {
	w := NewTimelessWindow(2, 10, 1, 3)
	for i, p := range [][]float64{{0, 5, 5}, {4, 5.5, 5}, {8, 5, 5.5}, {9, 50, 50}} {
		require.NoError(t, w.Add(uint64(i), p))
	}
	got := stepTo(t, w, 10)
	assert.Equal(t, []Labelled{{0, 0, true}, {1, 0, true}, {2, 0, true}, {3, Noise, false}}, got.Points)
	assert.Equal(t, Snapshot{Points: 4, Core: 3, Noise: 1, Clusters: 1}, got.Snapshot)
	assert.Equal(t, []Labelled{{1, Noise, false}, {2, Noise, false}, {3, Noise, false}}, stepTo(t, w, 10.5).Points, "time still tells when a point goes")
	require.ErrorIs(t, w.Add(9, []float64{5, 5}), ErrDims)
	require.ErrorIs(t, w.Add(9, []float64{5, 5, math.NaN()}), ErrNotFinite)
	require.NoError(t, NewTimelessWindow(4, 1, 1, 1).Add(9, make([]float64, 5)))
	require.ErrorIs(t, NewTimelessWindow(0, 1, 1, 1).Add(9, make([]float64, 1)), ErrDims)
}

// FuzzWindow reads parameters and then additions and steps from the input and
// compares every step with a full run.
func FuzzWindow(f *testing.F) {
	f.Add([]byte{0, 0, 0, 1, 2, 3, 4, 5, 250, 6})
	f.Add([]byte{1, 1, 3, 10, 20, 11, 21, 12, 22, 251, 13, 23, 252, 14, 24, 253, 255, 3})
	f.Add([]byte{2, 2, 2, 1, 2, 3, 1, 2, 4, 251, 1, 2, 5, 249, 1, 1, 251, 2, 2, 2, 252})
	f.Add([]byte{3, 3, 4, 1, 2, 3, 4, 251, 1, 2, 3, 5, 254, 1, 1, 1, 1, 251})
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) < 3 {
			return
		}
		dims := 1 + int(in[0])%MaxDims
		eps := []float64{1, 2, 0.8, math.Sqrt2, 0.5, 7}[in[1]%6]
		s := newStream(t, dims, []float64{4, 16, 40}[in[1]/6%3], eps, 1+int(in[2])%6)
		in = in[3:]
		steps := 0
		for len(in) > 0 && steps < 40 && len(s.ids) < 300 {
			switch op := in[0]; {
			case op >= 250: // let time pass
				in = in[1:]
				s.step(s.end + []float64{0, 0.25, 1, 3, 9, 50}[op-250])
				steps++
			case op == 249 && len(in) > 1:
				s.minSamples = 1 + int(in[1])%6
				require.NoError(t, s.w.SetMinSamples(s.minSamples))
				in = in[2:]
			case len(in) < dims:
				in = nil
			default: // a point, from late to early
				p := make([]float64, dims)
				p[0] = s.end - float64(int(op)-40)/4
				for k := 1; k < dims; k++ {
					p[k] = float64(in[k]%32) / 4
					if in[k] > 250 {
						p[k] = math.Ldexp(1, int(in[k]))
					}
				}
				in = in[dims:]
				s.add(p...)
			}
		}
		s.step(s.end)
	})
}

// Chains so thin that their links skip slabs, with late points everywhere: what
// a slab knows of one at the end of its reach changes with what that one knows.
func TestWindowEqualsFullRunOnThinChains(t *testing.T) {
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 6))
		dims := 1 + int(seed)%MaxDims
		s := newStream(t, dims, 40, 1, 2+r.IntN(3))
		for now := 0.0; now < 60; now += 2 {
			for range 1 + r.IntN(20) {
				p := make([]float64, dims)
				p[0] = now - 40*r.Float64()
				if r.IntN(3) > 0 { // a link about eps from another point
					p[0] = now + 0.97*float64(r.IntN(42)-41) + 0.05*r.Float64()
				}
				for k := 1; k < dims; k++ {
					p[k] = 0.9 * r.Float64()
				}
				s.add(p...)
			}
			s.step(now)
		}
	}
}

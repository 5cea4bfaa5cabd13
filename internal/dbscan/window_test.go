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

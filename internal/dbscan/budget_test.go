package dbscan

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/dbscan/dbscantest"
)

// broke clusters with a budget of so many comparisons.
func broke(tb testing.TB, points []float64, dims int, eps float64, minSamples int, budget int64) Result {
	tb.Helper()
	n := len(points) / dims
	res := Result{Labels: make([]int32, n), Core: make([]bool, n)}
	g, ok := gridOf(points, dims, eps, minSamples)
	require.True(tb, ok)
	g.budget = budget
	g.cluster(&res)
	return res
}

// Half of the points one hair too far from the other half, and no cell with
// min_samples of them: each is compared with all others, to no avail. Exactly, a
// million of them would take minutes.
func TestTheBudgetEndsAQuadraticSearch(t *testing.T) {
	const n = 100_000
	r := rand.New(rand.NewPCG(1, 1))
	points := make([]float64, 0, 2*n)
	for i := range n {
		points = append(points, 1.0001*float64(i%2), 1e-5*r.Float64())
	}
	got, err := Cluster(points, 2, 1, n/2+1)
	require.NoError(t, err)
	assert.True(t, got.Approximate)

	got, err = Cluster(points, 2, 1, n/2)
	require.NoError(t, err)
	assert.False(t, got.Approximate, "what short cuts answer costs nothing")
	assert.Equal(t, 2, got.Clusters)
}

func TestAllPointsAtOnePlaceAreExactAndCheap(t *testing.T) {
	points := slices.Repeat([]float64{3, 4, 5}, 200_000)
	for _, minSamples := range []int{5, 200_000, 200_001} {
		got, err := Cluster(points, 3, 0.8, minSamples)
		require.NoError(t, err)
		assert.False(t, got.Approximate)
		assert.Equal(t, minSamples <= 200_000, got.Clusters == 1)
	}
}

// What an exhausted budget may change: clusters that are less than three eps
// apart may come together. What belongs together is never torn apart, and the
// answer says that it is approximate.
func TestWithoutBudgetWhatBelongsTogetherStaysTogether(t *testing.T) {
	for kind := range dbscantest.Kinds {
		s := dbscantest.Make(kind, 3000, 2)
		exact, err := Cluster(s.Points, s.Dims, s.Eps, s.MinSamples)
		require.NoError(t, err)
		require.False(t, exact.Approximate)
		// Enough to find the core points, and nothing after it.
		g, ok := gridOf(s.Points, s.Dims, s.Eps, s.MinSamples)
		require.True(t, ok)
		g.budget = 1 << 40
		g.startWalks()
		for i := range g.slabs {
			g.findCores(i)
		}
		got := broke(t, s.Points, s.Dims, s.Eps, s.MinSamples, 1<<40-g.budget)
		require.Equal(t, exact.Core, got.Core)
		if exact.Clusters != got.Clusters {
			require.True(t, got.Approximate, kind)
		}
		to := map[int32]int32{}
		for i, label := range exact.Labels {
			if label == Noise || !exact.Core[i] {
				continue
			}
			if _, ok := to[label]; !ok {
				to[label] = got.Labels[i]
			}
			require.Equal(t, to[label], got.Labels[i], "%s: cluster %d is torn apart", kind, label)
		}
	}
}

func TestWithoutAnyBudgetAllPointsAreStillLabelled(t *testing.T) {
	for kind := range dbscantest.Kinds {
		s := dbscantest.Make(kind, 3000, 2)
		got := broke(t, s.Points, s.Dims, s.Eps, s.MinSamples, 0)
		assert.True(t, got.Approximate, kind)
		for i, label := range got.Labels {
			require.GreaterOrEqual(t, label, Noise)
			require.Less(t, label, int32(got.Clusters))
			if got.Core[i] {
				require.NotEqual(t, Noise, label)
			}
		}
		assert.Equal(t, got, broke(t, s.Points, s.Dims, s.Eps, s.MinSamples, 0), "the same each time")
	}
}

// What the budget was measured on stays far below it.
func TestOrdinaryDataIsFarFromTheBudget(t *testing.T) {
	for _, kind := range []string{"S", "W", "N", "Q", "R"} {
		s := dbscantest.Make(kind, 50_000, 1)
		n := len(s.Points) / s.Dims
		res := Result{Labels: make([]int32, n), Core: make([]bool, n)}
		g, ok := gridOf(s.Points, s.Dims, s.Eps, s.MinSamples)
		require.True(t, ok)
		g.refill(n)
		start := g.budget
		g.cluster(&res)
		assert.Less(t, start-g.budget, int64(20*n), kind)
	}
}

// An approximate slab is said to be one for as long as its answer is used.
func TestAWindowSaysThatAStepWasApproximate(t *testing.T) {
	const n = 60_000
	w := NewWindow(2, 10, 1, n/2+1)
	r := rand.New(rand.NewPCG(1, 1))
	for i := range n {
		require.NoError(t, w.Add(uint64(i), []float64{5 + 1e-5*r.Float64(), 1.0001 * float64(i%2)}))
	}
	step := func(end float64) bool {
		snap, err := w.Step(end)
		require.NoError(t, err)
		return snap.Approximate
	}
	assert.True(t, step(10))
	assert.True(t, step(11))
	assert.False(t, step(20), "they have gone")
}

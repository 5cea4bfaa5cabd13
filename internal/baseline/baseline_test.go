package baseline

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

const slice = 30 * time.Minute / nSlices

func book(change func(*Config)) *Book {
	cfg := Config{
		Quantile: 0.99, Factor: 2, Window: 30 * time.Minute, MinSamples: 100,
		MinExcess: 0.005, FallbackThreshold: 1, MaxSeries: 10_000,
	}
	if change != nil {
		change(&cfg)
	}
	return New(cfg, epoch)
}

func learn(s *Series, n int, v float64) {
	for range n {
		s.Learn(v)
	}
}

func TestLimitIsTheLargestOfItsThreeTerms(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	tests := []struct {
		name  string
		value func(i int) float64
		// want computes the limit from the sorted values
		want func(v []float64) float64
	}{
		{
			"a spread distribution by its quantile",
			func(int) float64 { return 0.1 + 0.1*rng.Float64() },
			func(v []float64) float64 { return 2 * v[len(v)*99/100] },
		},
		{
			"a narrow one far from zero by factor too",
			func(int) float64 { return 0.1 },
			func([]float64) float64 { return 0.2 },
		},
		{
			"two levels by the deviation from the median",
			func(i int) float64 { return []float64{0.01, 0.2, 0.2, 0.2, 0.01, 0.3, 0.3, 0.01}[i%8] },
			func([]float64) float64 { return 0.2 + 6*0.1 },
		},
		{
			"a stage that is nearly always zero by min_excess",
			func(i int) float64 { return map[bool]float64{true: 0.0001}[i%50 == 0] },
			func([]float64) float64 { return 0.005 },
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := book(nil).Group("svc", "chat").Series("lock", true)
			var values []float64
			for i := range 1000 {
				v := tt.value(i)
				values = append(values, v)
				s.Learn(v)
			}
			s.cache = summary{} // as at the next slice
			slices.Sort(values)
			want := tt.want(values)
			got := s.Judge(0, false)
			assert.InEpsilon(t, want, got.Threshold, 0.03)
			assert.False(t, s.Judge(want*0.95, false).Exceeds)
			assert.True(t, s.Judge(want*1.05, false).Exceeds)
			assert.Equal(t, Own, got.State)
		})
	}
}

func TestJudgesByTheParentThenTheFallbackWhileThereAreTooFewValues(t *testing.T) {
	b := book(nil)
	chat := b.Group("svc", "chat").Series("lock", true)
	assert.Equal(t, Verdict{false, 0, 1, Fallback}, chat.Judge(0.9, true))
	assert.Equal(t, Verdict{true, 0, 1, Fallback}, chat.Judge(1.1, true))
	assert.Equal(t, Verdict{State: None}, chat.Judge(1.1, false), "no fallback was asked for")

	learn(chat, 99, 0.1)
	assert.Equal(t, Fallback, chat.Judge(0.3, true).State, "one value short")
	learn(chat, 1, 0.1)
	assert.Equal(t, Own, chat.Judge(0.3, true).State)

	other := b.Group("svc", "embeddings").Series("lock", true)
	got := other.Judge(0.3, true)
	assert.Equal(t, Parent, got.State)
	assert.True(t, got.Exceeds)
	assert.InEpsilon(t, 0.1, got.Baseline, 0.02)
	assert.Equal(t, Fallback, b.Group("other", "chat").Series("lock", true).Judge(0.3, true).State, "another service knows nothing of it")
	assert.Equal(t, Fallback, b.Group("svc", "embeddings").Series("syscall", true).Judge(0.3, true).State, "nor does another stage")
}

func TestSpikesDoNotRaiseTheBaseline(t *testing.T) {
	for _, tt := range []struct {
		name    string
		leaveIn func(*Series, float64)
	}{{"lone", (*Series).Defer}, {"clustered", (*Series).Exclude}} {
		t.Run(tt.name, func(t *testing.T) {
			s := book(nil).Group("svc", "chat").Series("lock", true)
			learn(s, 1000, 0.01)
			before := s.Judge(1, false)
			for range 100 { // a tenth of all values, far above the quantile's 1 %
				tt.leaveIn(s, 1)
			}
			learn(s, 100, 0.01)
			assert.Equal(t, before, s.Judge(1, false))
		})
	}
}

func TestASeriesWithTooFewValuesLearnsItsSpikes(t *testing.T) {
	b := book(nil)
	learn(b.Group("svc", "health").Series("wait", true), 200, 0.001)
	s := b.Group("svc", "chat").Series("wait", true) // unlike the rest of its service
	for range 100 {
		assert.True(t, s.Judge(2, false).Exceeds)
		s.Exclude(2)
	}
	assert.False(t, s.Judge(2, false).Exceeds, "it knows itself now")
}

func TestLoneSpikesThatGoOnForHalfAWindowBecomeNormal(t *testing.T) {
	b := book(nil)
	s := b.Group("svc", "chat").Series("lock", true)
	for i := range nSlices/2 + 1 {
		learn(s, 200, 0.01)
		for range 10 {
			s.Defer(0.5)
		}
		assert.Equal(t, i < nSlices/2, s.Judge(0.5, false).Exceeds, "slice %d", i)
		changes := b.Step(epoch.Add(time.Duration(i+1) * slice))
		if i == nSlices/2-1 {
			// The operation and its parent, which has no other.
			require.Len(t, changes, 2)
			assert.Equal(t, "chat", changes[1].Operation)
			assert.InEpsilon(t, 0.5, changes[1].After, 0.02)
		} else {
			assert.Empty(t, changes, "reported once, slice %d", i)
		}
	}
}

func TestLoneSpikesWithAPauseStaySpikes(t *testing.T) {
	b := book(nil)
	s := b.Group("svc", "chat").Series("lock", true)
	for i := range 2 * nSlices {
		learn(s, 200, 0.01)
		if i%3 != 2 {
			s.Defer(0.5)
			s.Defer(0.5)
			s.Defer(0.5)
		}
		assert.True(t, s.Judge(0.5, false).Exceeds, "slice %d", i)
		assert.Empty(t, b.Step(epoch.Add(time.Duration(i+1)*slice)))
	}
}

func TestAnIncidentThatOutnumbersTheRestForHalfAWindowBecomesTheNewLevel(t *testing.T) {
	b := book(nil)
	s := b.Group("svc", "chat").Series("lock", true)
	learn(s, 1000, 0.01)
	now := epoch
	var changes []Change
	for i := range nSlices {
		for range 200 {
			if s.Judge(0.1, false).Exceeds {
				s.Exclude(0.1)
			} else {
				s.Learn(0.1)
			}
		}
		now = now.Add(slice)
		changes = append(changes, b.Step(now)...)
		if i == 1 {
			assert.True(t, s.Judge(0.1, false).Exceeds, "not before half a window")
		}
	}
	assert.False(t, s.Judge(0.1, false).Exceeds)
	require.Len(t, changes, 2, "the operation and its parent, once each")
	assert.InEpsilon(t, 0.01, changes[1].Before, 0.02)
	assert.InEpsilon(t, 0.1, changes[1].After, 0.02)
}

func TestForgetsWhatIsOlderThanTheWindow(t *testing.T) {
	b := book(nil)
	s := b.Group("svc", "chat").Series("lock", true)
	learn(s, 200, 5)
	for i := range nSlices {
		assert.False(t, s.Judge(6, false).Exceeds, "slice %d", i)
		b.Step(epoch.Add(time.Duration(i+1) * slice))
		learn(s, 200, 0.01)
	}
	assert.True(t, s.Judge(6, false).Exceeds)
	b.Step(epoch.Add(24 * time.Hour)) // long asleep
	assert.Equal(t, None, s.Judge(6, false).State)
}

func TestForgetsTheLeastRecentlyUsedOperationWhenFull(t *testing.T) {
	b := book(func(c *Config) { c.MaxSeries = 10 })
	for i := range 100 {
		for _, stage := range []string{"lock", "cpu"} {
			b.Group("svc", fmt.Sprint("op", i)).Series(stage, true).Learn(1)
			learn(b.Group("svc", "chat").Series(stage, true), 2, 1)
		}
		require.LessOrEqual(t, b.series, 11, "the bound, and the parent of the series that was made room for")
	}
	assert.Equal(t, 200, b.Group("svc", "chat").Series("lock", true).count(), "the one in use stays")
	assert.Equal(t, 300, b.Group("svc", Every).Series("lock", true).count(), "and so does its parent")
	own, warming, evicted := b.Stats()
	assert.Equal(t, b.series, own+warming)
	assert.Greater(t, evicted, int64(180))

	for i := range 100 { // many services: parents go with their last operation
		b.Group(fmt.Sprint("svc", i), "chat").Series("lock", true).Learn(1)
	}
	require.LessOrEqual(t, b.series, 11)
	require.LessOrEqual(t, len(b.groups), 12)
	assert.Equal(t, len(b.groups), b.lru.Len())
}

func TestValuesThatAreNoDurationAreIgnored(t *testing.T) {
	s := book(nil).Group("svc", "chat").Series("lock", true)
	for _, v := range []float64{math.NaN(), math.Inf(1), math.Inf(-1), -1} {
		s.Learn(v)
		s.Exclude(v)
		s.Defer(v)
		assert.Equal(t, Verdict{State: None}, s.Judge(v, true))
	}
	assert.Zero(t, s.count())
	s.Learn(math.MaxFloat64)
	s.Learn(math.SmallestNonzeroFloat64)
	assert.Equal(t, 2, s.count())
}

func BenchmarkJudgeAndLearn(b *testing.B) {
	bk := book(nil)
	rng := rand.New(rand.NewPCG(1, 1))
	values := make([]float64, 4096)
	for i := range values {
		values[i] = 0.02 + rng.ExpFloat64()*0.05
	}
	for i := 0; b.Loop(); i++ {
		s := bk.Group("svc", "chat").Series("lock", true)
		v := values[i%len(values)]
		if !s.Judge(v, true).Exceeds {
			s.Learn(v)
		}
	}
}

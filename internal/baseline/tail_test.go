package baseline

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func tails() *Tails {
	return NewTails(Config{Quantile: 0.99, Window: 30 * time.Minute, MinSamples: 100}, epoch)
}

// pass fills n windows with requests of a service, ends them, and returns what is
// known then.
func (t *Tails) pass(n, requests int, duration func(window int) float64) TailReport {
	var ended *EndedTails
	for i := range n {
		for range requests {
			t.Add("llm", duration(i))
		}
		ended = t.Step(t.rotated.Add(slice))
	}
	return ended.Reports()[0]
}

// exponential has a P99 of 4.6 times the mean.
func exponential(rng *rand.Rand, mean float64) func(int) float64 {
	return func(int) float64 { return mean * rng.ExpFloat64() }
}

func TestCompareIsTheTextbooksTest(t *testing.T) {
	// (0.06-0.03)/sqrt(0.045·0.955·(2/1000)) and 2·asin√0.06 - 2·asin√0.03
	c := Compare(Share{60, 1000}, Share{30, 1000})
	assert.InDelta(t, 3.2360, c.Z, 1e-3)
	assert.InDelta(t, 0.1468, c.Effect, 1e-3)

	back := Compare(Share{30, 1000}, Share{60, 1000})
	assert.InDelta(t, -c.Z, back.Z, 1e-12)
	assert.InDelta(t, -c.Effect, back.Effect, 1e-12)

	for _, same := range []Share{{0, 10}, {10, 10}} {
		assert.Equal(t, Comparison{}, Compare(same, same), "nothing differs")
	}
	all := Compare(Share{10, 10}, Share{0, 10})
	assert.InDelta(t, math.Pi, all.Effect, 1e-12)
	assert.False(t, math.IsNaN(all.Z) || math.IsInf(all.Z, 0))
}

func TestATailThatGrowsIsToldFromOneThatDoesNot(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	report := func(after float64) Comparison {
		ts := tails()
		ts.pass(9, 2000, exponential(rng, 0.1))
		r := ts.pass(3, 2000, exponential(rng, after))
		require.NotNil(t, r.Change)
		return *r.Change
	}
	worse, better := report(0.15), report(0.07)
	assert.Greater(t, worse.Z, 10.0)
	assert.InDelta(t, 0.23, worse.Effect, 0.05, "of 1 % the share above the limit has become 4.6 %")
	assert.Less(t, better.Z, -4.0)
	assert.Less(t, better.Effect, -0.05)
}

// The limit is the P99 of one of the samples; the test must not mistake that for
// knowledge.
func TestWithoutAChangeZIsAsOftenLargeAsItShouldBe(t *testing.T) {
	rng := rand.New(rand.NewPCG(2, 1))
	var squares float64
	large := 0
	const runs = 300
	for range runs {
		z := tails().pass(12, 1000, exponential(rng, 0.1)).Change.Z
		squares += z * z
		if math.Abs(z) > 2.576 {
			large++
		}
	}
	assert.InDelta(t, 1, squares/runs, 0.35, "variance of z")
	assert.LessOrEqual(t, large, 12, "of 300 beyond what is so once in 100")
}

func TestJitterIsTheDeviationOfTheWindowsTails(t *testing.T) {
	r := tails().pass(6, 200, func(i int) float64 { return []float64{1, 2}[i%2] })
	require.NotNil(t, r.Jitter)
	// Quantiles 1,2,1,2,1,2: mean 1.5, deviation sqrt(6·0.25/5).
	assert.InDelta(t, math.Sqrt(0.3)/1.5, *r.Jitter, 0.01)
	assert.InDelta(t, 0, *tails().pass(6, 200, func(int) float64 { return 1 }).Jitter, 1e-9, "steady")
}

func TestOfTooFewRequestsNothingIsSaid(t *testing.T) {
	few := tails().pass(12, 20, func(int) float64 { return 1 })
	assert.Nil(t, few.Jitter, "20 requests in a window")
	assert.Nil(t, few.Change, "60 requests in three windows")

	young := tails().pass(2, 200, func(int) float64 { return 1 })
	assert.Nil(t, young.Jitter, "two windows")
	assert.Nil(t, young.Change, "nothing before")

	assert.Nil(t, tails().pass(6, 200, func(int) float64 { return 0 }).Jitter, "no ratio to nothing")
}

// What has ended does not change with what comes.
func TestEndedWindowsStayAsTheyWere(t *testing.T) {
	ts := tails()
	ts.pass(6, 200, func(i int) float64 { return float64(i + 1) })
	ended := ts.Step(ts.rotated.Add(slice))
	before := ended.Reports()
	ts.pass(20, 200, func(int) float64 { return 100 })
	ts.Add("other", 1)
	assert.Equal(t, before, ended.Reports())
}

func TestTailsAreBoundedAndForgotten(t *testing.T) {
	ts := tails()
	for i := range maxTails + 10 {
		assert.Equal(t, i < maxTails, ts.Add(fmt.Sprint("svc", i), 1))
		ts.Add("odd", math.NaN())
	}
	assert.Len(t, ts.services, maxTails)
	for range tailWindows - 1 {
		assert.NotNil(t, ts.Step(ts.rotated.Add(slice)))
		assert.Nil(t, ts.Step(ts.rotated))
	}
	assert.Len(t, ts.services, maxTails)
	assert.Empty(t, ts.Step(ts.rotated.Add(slice)).Reports(), "an hour of silence")
	assert.Empty(t, ts.services)
	ts.Add("new", 1)
	assert.Len(t, ts.services, 1)
	ts.Step(ts.rotated.Add(1000 * time.Hour))
	assert.Empty(t, ts.services)
}

func BenchmarkReports(b *testing.B) {
	ts := tails()
	rng := rand.New(rand.NewPCG(1, 1))
	var ended *EndedTails
	for range tailWindows {
		for i := range maxTails {
			for range 100 {
				ts.Add(fmt.Sprint("svc", i), 0.1*rng.ExpFloat64())
			}
		}
		ended = ts.Step(ts.rotated.Add(slice))
	}
	for b.Loop() {
		if len(ended.Reports()) != maxTails {
			b.Fatal("services are missing")
		}
	}
}

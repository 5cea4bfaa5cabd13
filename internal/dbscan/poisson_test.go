package dbscan

import (
	"math"
	"math/big"
	"testing"

	"github.com/stretchr/testify/assert"
)

// tail sums P(X ≥ k) upwards from k with 200 bits: the other way round than the
// package, and without logarithms.
func tail(mean float64, k int) float64 {
	num := func(x float64) *big.Float { return new(big.Float).SetPrec(200).SetFloat64(x) }
	term, sum := num(1), num(0) // term is mean^j / j!
	for j := range k + 400 + int(20*math.Sqrt(mean)) {
		if j >= k {
			sum.Add(sum, term)
		}
		term.Mul(term, num(mean)).Quo(term, num(float64(j+1)))
	}
	for left := mean; left > 0; left -= 500 { // times e^-mean, in parts that a float64 holds
		sum.Mul(sum, num(math.Exp(-min(left, 500))))
	}
	f, _ := sum.Float64()
	return f
}

func TestPoissonMinSamplesIsTheSmallestBelowTheLimit(t *testing.T) {
	for _, expected := range []float64{1e-300, 1e-7, 1e-6, 1e-3, 0.1, 0.5, 1, 2, 3.7, 10, 50, 333.3, 1000, 5000} {
		k := PoissonMinSamples(expected)
		assert.LessOrEqual(t, tail(expected, k), 1e-6, "mean %v: %d is not enough", expected, k)
		assert.Greater(t, tail(expected, k-1), 1e-6, "mean %v: %d would do", expected, k-1)
	}
}

func TestPoissonMinSamplesAtTheEndsOfItsRange(t *testing.T) {
	assert.Equal(t, 1, PoissonMinSamples(0))
	assert.Equal(t, 1, PoissonMinSamples(-1))
	assert.Equal(t, math.MaxInt32, PoissonMinSamples(math.NaN()))
	assert.Equal(t, math.MaxInt32, PoissonMinSamples(math.Inf(1)))
	assert.Equal(t, math.MaxInt32, PoissonMinSamples(2e9))
	// For a large mean the normal quantile holds, with its skewness term.
	for _, mean := range []float64{1e6, 1e8, 1e9} {
		const z = 4.753424308822899 // Φ(z) = 1 - 1e-6
		assert.InDelta(t, mean+z*math.Sqrt(mean)+(z*z-1)/6+0.5, float64(PoissonMinSamples(mean)), 1.5)
	}
}

func TestPoissonMinSamplesNeverFallsAsTheMeanRises(t *testing.T) {
	last := 0
	for mean := 0.0; mean < 300; mean += 0.25 {
		k := PoissonMinSamples(mean)
		assert.GreaterOrEqual(t, k, last)
		last = k
	}
}

package dbscan

import "math"

// chance is the probability at which a count of background points is taken to
// be no accident.
const chance = 1e-6

// PoissonMinSamples returns the smallest k such that a Poisson variable with
// this mean is k or more with a probability of at most 1e-6:
//
//	P(X ≥ k) = Σ_{j≥k} e^-λ λ^j / j!  ≤  1e-6,  λ = expected
//
// With expected the mean number of background points in a ball of radius eps,
// it is the min_samples above which chance alone makes a given point core once
// in a million. At least 1, for no background at all. When expected is NaN or
// above 1e9 it returns math.MaxInt32: no count of points is then known to be
// surprising.
func PoissonMinSamples(expected float64) int {
	if expected <= 0 {
		return 1
	}
	if !(expected <= 1e9) { // NaN too
		return math.MaxInt32
	}
	// Add the terms up from where they are beyond notice, 8 standard
	// deviations out, down to where their sum passes the limit.
	k := math.Ceil(expected + 8*math.Sqrt(expected) + 30)
	logMean := math.Log(expected)
	logFactorial, _ := math.Lgamma(k + 1)
	logTerm := k*logMean - expected - logFactorial
	tail := 0.0
	for ; k > 0; k-- {
		tail += math.Exp(logTerm)
		if tail > chance {
			break
		}
		logTerm += math.Log(k) - logMean
	}
	return int(k) + 1
}

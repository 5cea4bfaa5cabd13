// Package dbscantest makes data to measure DBSCAN on: the same points for the
// same seed on any machine, shaped like latency spikes over a background.
package dbscantest

import (
	"fmt"
	"math"
	"math/rand/v2"
)

// Set is data with the parameters that suit it.
type Set struct {
	Points     []float64 // row by row, scaled
	Dims       int
	Eps        float64
	MinSamples int
}

// Kinds names what Make makes.
var Kinds = map[string]string{
	"S": "sparse: 167 points/s, 70 % uniform background, 30 % in dense spikes",
	"W": "window: 60 s whatever the number, log-normal body, 3 % in spikes",
	"N": "nasty: half of the points within one ball of radius eps, the rest as S",
	"Q": "quantised: as W in whole milliseconds and tenths, so many ties and duplicates",
	"R": "requests: (latency in ms, hops) in two dimensions, most points in few balls",
	"H": "shells: two spheres nowhere quite eps apart, made to defeat short cuts",
}

// The scales of the axes of S, W, N and Q: time, stage, latency.
const (
	second = 1 / 0.5
	stage  = 1 / 2.0
	millis = 1 / 10.0
	stages = 24
)

// Make returns n points of a kind. It panics for a kind that is not in Kinds.
func Make(kind string, n int, seed uint64) Set {
	g := generator{rand.New(rand.NewPCG(seed, 0))}
	set := Set{Dims: 3, Eps: 0.8, MinSamples: 5}
	switch kind {
	case "S":
		set.Points = g.sparse(n)
	case "W":
		set.Points = g.window(n)
	case "N":
		set.Points = append(g.sparse(n-n/2), g.ball(n/2)...)
	case "Q":
		set.Points = g.window(n)
		for i := 0; i < len(set.Points); i += 3 {
			set.Points[i] = round(set.Points[i]/second, 1000) * second
			set.Points[i+2] = round(set.Points[i+2]/millis, 10) * millis
		}
	case "R":
		set = Set{Points: g.requests(n), Dims: 2, Eps: 42.5, MinSamples: 87}
	case "H":
		set.Points = g.shells(n)
	default:
		panic(fmt.Sprintf("dbscantest: no kind %q", kind))
	}
	g.Shuffle(n, func(i, j int) {
		for k := range set.Dims {
			a, b := i*set.Dims+k, j*set.Dims+k
			set.Points[a], set.Points[b] = set.Points[b], set.Points[a]
		}
	})
	return set
}

func round(x, perUnit float64) float64 { return math.Round(x*perUnit) / perUnit }

type generator struct{ *rand.Rand }

func (g generator) uniform(lo, hi float64) float64 { return lo + g.Float64()*(hi-lo) }

func scaled(seconds float64, stageID int, ms float64) []float64 {
	return []float64{seconds * second, float64(stageID) * stage, ms * millis}
}

// sparse spreads the points over as much time as they need at 167 a second.
func (g generator) sparse(n int) []float64 {
	span := float64(n) / 167
	background := n * 7 / 10
	out := make([]float64, 0, 3*n)
	for range background {
		out = append(out, scaled(g.uniform(0, span), g.IntN(stages), g.uniform(0.2, 200))...)
	}
	return append(out, g.spikes(n-background, span, 250)...)
}

// window puts the points into 60 s.
func (g generator) window(n int) []float64 {
	const span = 60
	background := n * 97 / 100
	out := make([]float64, 0, 3*n)
	for range background {
		out = append(out, scaled(g.uniform(0, span), g.IntN(stages), 8*math.Exp(0.6*g.NormFloat64()))...)
	}
	return append(out, g.spikes(n-background, span, max(60, float64(n)/400))...)
}

// spikes makes clumps of about mean points, on one stage or two neighbouring
// ones, at 40 to 400 ms.
func (g generator) spikes(n int, span, mean float64) []float64 {
	var out []float64
	for n > 0 {
		size := min(n, int(max(20, g.ExpFloat64()*mean)))
		n -= size
		at, id, ms := g.uniform(0, span), g.IntN(stages), g.uniform(40, 400)
		dt, dms := g.uniform(0.1, 1.5), g.uniform(1, 12)
		for range size {
			out = append(out, scaled(
				min(max(at+dt*g.NormFloat64(), 0), span),
				min(id+g.IntN(2), stages-1),
				math.Abs(ms+dms*g.NormFloat64()))...)
		}
	}
	return out
}

// ball puts the points within a radius of 0.39, less than half of eps.
func (g generator) ball(n int) []float64 {
	out := make([]float64, 0, 3*n)
	for range n {
		v := g.direction()
		r := 0.39 * math.Cbrt(g.Float64())
		out = append(out, 30*second+v[0]*r, 10*stage+v[1]*r, 120*millis+v[2]*r)
	}
	return out
}

// shells alternates between two spheres that are 0.8001 apart.
func (g generator) shells(n int) []float64 {
	out := make([]float64, 0, 3*n)
	for i := range n {
		v := g.direction()
		r := []float64{1, 1.8001}[i%2]
		out = append(out, v[0]*r, v[1]*r, v[2]*r)
	}
	return out
}

func (g generator) direction() [3]float64 {
	x, y, z := g.NormFloat64(), g.NormFloat64(), g.NormFloat64()
	l := math.Sqrt(x*x + y*y + z*z)
	return [3]float64{x / l, y / l, z / l}
}

func (g generator) requests(n int) []float64 {
	body := n * 98 / 100
	out := make([]float64, 0, 2*n)
	for range body {
		out = append(out, 60*math.Exp(0.7*g.NormFloat64()), float64(1+g.IntN(8)))
	}
	for i := range n - body {
		out = append(out, float64(1500+900*(i%6))+60*g.NormFloat64(), float64(2+g.IntN(4)))
	}
	return out
}

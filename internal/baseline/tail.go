package baseline

import (
	"cmp"
	"math"
	"slices"
	"strings"
	"time"
)

// Windows by which tails are compared. One takes as long as a slice of the
// baseline: 5 minutes with the default of 30.
const (
	tailWindows   = 13 // that are remembered, the one that is being filled included
	recentWindows = 3  // the last full ones, that are compared with those before
	jitterWindows = 6  // the last full ones, of which the jitter ratio is made
	jitterLeast   = 3  // of these must have values enough
)

// maxTails bounds the services: about 50 kB each.
const maxTails = 500

// Tails follows the upper end of each service's request durations: how much it
// wavers, and whether it is heavier than it was. Other than in a Book, spikes
// count as all else does. It is not safe for concurrent use, and its clock is the
// caller's.
type Tails struct {
	cfg      Config
	services map[string]*tail
	rotated  time.Time // start of the current window
	window   uint32    // its number, ever growing
}

// tail is the request durations of one service, by window number modulo
// tailWindows.
type tail [tailWindows]tailWindow

type tailWindow struct {
	number    uint32 // 0 means never used
	durations sketch
}

// NewTails returns an empty one. Of the configuration it uses Quantile, Window and
// MinSamples.
func NewTails(cfg Config, start time.Time) *Tails {
	return &Tails{cfg: cfg, services: map[string]*tail{}, rotated: start, window: tailWindows}
}

// Add takes a request's duration in seconds, and tells whether it was: there are
// more services than are followed if not. Values that are no duration are ignored.
func (t *Tails) Add(service string, seconds float64) bool {
	if !valid(seconds) {
		return true
	}
	s, ok := t.services[service]
	if !ok {
		if len(t.services) >= maxTails {
			return false
		}
		s = &tail{}
		t.services[strings.Clone(service)] = s
	}
	w := &s[t.window%tailWindows]
	if w.number != t.window {
		*w = tailWindow{number: t.window}
	}
	add(&w.durations, seconds)
	return true
}

// Step lets time pass. If a window has ended, it returns those that have, else
// nil. Services of which nothing was heard in all windows are forgotten.
func (t *Tails) Step(now time.Time) *EndedTails {
	width := t.cfg.Window / nSlices
	n := int(now.Sub(t.rotated) / width)
	if n <= 0 {
		return nil
	}
	t.rotated = t.rotated.Add(time.Duration(n) * width)
	t.window += uint32(min(n, tailWindows))
	e := &EndedTails{cfg: t.cfg, window: t.window, services: make(map[string]tail, len(t.services))}
	for name, s := range t.services {
		if !slices.ContainsFunc(s[:], func(w tailWindow) bool { return w.number != 0 && t.window-w.number < tailWindows }) {
			delete(t.services, name)
			continue
		}
		e.services[name] = *s
	}
	return e
}

// EndedTails are the windows that have ended. Nothing changes them any more, so
// they can be used while the Tails go on.
type EndedTails struct {
	cfg      Config
	window   uint32 // that follows them
	services map[string]tail
}

// between returns what the service's windows hold whose age in windows is at
// least from, which is above 0, and below to; nil for nothing.
func (e *EndedTails) between(s *tail, from, to uint32) (all sketch) {
	for i := range s {
		w := &s[i]
		if age := e.window - w.number; w.number != 0 && age >= from && age < to {
			merge(&all, w.durations)
		}
	}
	return all
}

// TailReport is what is known of one service's tail. What is not known is nil.
type TailReport struct {
	Service string
	// Jitter is σ(P)/µ(P) of the windows' quantiles P: 0 for a tail that does not
	// waver.
	Jitter *float64
	// Change compares the last windows with those before them.
	Change *Comparison
}

// Reports returns what is known of each service, by name.
func (e *EndedTails) Reports() []TailReport {
	reports := make([]TailReport, 0, len(e.services))
	for name, s := range e.services {
		reports = append(reports, TailReport{Service: name, Jitter: e.jitter(&s), Change: e.change(&s)})
	}
	slices.SortFunc(reports, func(a, b TailReport) int { return cmp.Compare(a.Service, b.Service) })
	return reports
}

// enough tells whether there are values enough to speak of a quantile.
func (e *EndedTails) enough(s sketch) bool {
	return s != nil && s.GetCount() >= float64(e.cfg.MinSamples)
}

func (e *EndedTails) jitter(s *tail) *float64 {
	var tails []float64
	for age := uint32(1); age <= jitterWindows; age++ {
		if w := e.between(s, age, age+1); e.enough(w) {
			tails = append(tails, at(w, e.cfg.Quantile))
		}
	}
	if len(tails) < jitterLeast {
		return nil
	}
	var sum, squares float64
	for _, v := range tails {
		sum += v
	}
	mean := sum / float64(len(tails))
	if mean == 0 {
		return nil // no ratio to nothing
	}
	for _, v := range tails {
		squares += (v - mean) * (v - mean)
	}
	ratio := math.Sqrt(squares/float64(len(tails)-1)) / mean
	return &ratio
}

// change compares the share of requests above the quantile of the windows before
// the recent ones. That limit is itself known from as many requests only, which
// adds to the variance of the recent share just what the test's formula has for
// the share before.
func (e *EndedTails) change(s *tail) *Comparison {
	recent := e.between(s, 1, 1+recentWindows)
	before := e.between(s, 1+recentWindows, tailWindows)
	if !e.enough(recent) || !e.enough(before) {
		return nil
	}
	c := Compare(above(recent, at(before, e.cfg.Quantile)), above(before, at(before, e.cfg.Quantile)))
	return &c
}

// above counts the values above the limit, which is one that the sketches tell
// apart: the middle of a bin.
func above(s sketch, limit float64) Share {
	share := Share{N: s.GetCount()}
	s.ForEach(func(v, n float64) bool {
		if v > limit {
			share.K += n
		}
		return false
	})
	return share
}

// Share is K of N.
type Share struct{ K, N float64 }

// Comparison is that of two shares.
type Comparison struct {
	// Z is the difference of the shares in standard deviations, positive where the
	// first is larger. Without a difference it is beyond ±2.6 once in 100 times,
	// beyond ±3.3 once in 1,000.
	Z float64
	// Effect is Cohen's h, -π to π: how large the difference is, however sure.
	Effect float64
}

// Compare tests whether two shares differ, by the two-proportion z test with the
// pooled share p,
//
//	z = (pa - pb) / sqrt(p·(1-p)·(1/na + 1/nb))
//
// (NIST/SEMATECH e-Handbook of Statistical Methods, 7.3.3), and how much, by
// Cohen's h = 2·asin√pa - 2·asin√pb (J. Cohen, Statistical Power Analysis for the
// Behavioral Sciences, 2nd edition 1988, chapter 6). Both N are above 0.
func Compare(a, b Share) Comparison {
	pa, pb := a.K/a.N, b.K/b.N
	p := (a.K + b.K) / (a.N + b.N)
	c := Comparison{Effect: 2*math.Asin(math.Sqrt(pa)) - 2*math.Asin(math.Sqrt(pb))}
	if p > 0 && p < 1 { // else both are the same
		c.Z = (pa - pb) / math.Sqrt(p*(1-p)*(1/a.N+1/b.N))
	}
	return c
}

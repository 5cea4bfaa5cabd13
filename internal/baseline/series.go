package baseline

import (
	"cmp"
	"math"
	"slices"

	"github.com/DataDog/sketches-go/ddsketch"
	"github.com/DataDog/sketches-go/ddsketch/mapping"
	"github.com/DataDog/sketches-go/ddsketch/store"
)

// The range in which values are told apart, in seconds: a microsecond to a day.
// Below is zero, above is a day.
const (
	minValue = 1e-6
	maxValue = 86400
)

// accuracy is the sketches' relative error.
const accuracy = 0.01

// madFactor: a value further above the median than this many median absolute
// deviations is no accident; 6 of them are 4 standard deviations of a normal
// distribution.
const madFactor = 6

// refreshShare is the share of new values at which a summary is computed anew
// within a slice.
const refreshShare = 0.05

var buckets = func() mapping.IndexMapping {
	m, err := mapping.NewCubicallyInterpolatedMapping(accuracy)
	if err != nil {
		panic(err) // cannot be: accuracy is a constant in (0,1)
	}
	return m
}()

// sketch counts values; nil is an empty one.
type sketch = *ddsketch.DDSketch

// add puts v into *s. Values that are no time are the caller's to sort out, see
// valid, so that Add cannot fail.
func add(s *sketch, v float64) {
	if *s == nil {
		*s = ddsketch.NewDDSketchFromStoreProvider(buckets, store.DenseStoreConstructor)
	}
	if v < minValue {
		v = 0
	}
	_ = (*s).Add(min(v, maxValue))
}

// merge adds from's values to *s.
func merge(s *sketch, from sketch) {
	switch {
	case from == nil:
	case *s == nil:
		*s = from.Copy()
	default:
		_ = (*s).MergeWith(from) // fails for different mappings only
	}
}

// valid tells whether v can be a duration.
func valid(v float64) bool { return v >= 0 && !math.IsInf(v, 1) }

// Series is the rolling distribution of one stage of one operation.
type Series struct {
	book   *Book
	parent *Series       // nil if there is none to ask
	ring   [nSlices]part // by slice number modulo nSlices
	cache  summary
}

// part is one slice of a series.
type part struct {
	slice    uint32 // its number; 0 means never used
	learned  sketch // what is normal
	deferred sketch // lone spikes
	excluded sketch // spikes that were part of an incident
	n        int    // number of values in each
	nLater   int
	nOut     int
}

// summary is what a series judges by.
type summary struct {
	slice    uint32  // when it was computed,
	n        int     // and the values of that slice at the time
	count    int     // of all values
	quantile float64 // seconds
	limit    float64 // seconds
}

// current returns the part that is being filled.
func (s *Series) current() *part {
	p := &s.ring[s.book.slice%nSlices]
	if p.slice != s.book.slice {
		*p = part{slice: s.book.slice}
	}
	return p
}

// live tells whether the window still holds the part.
func (s *Series) live(p *part) bool { return p.slice != 0 && s.book.slice-p.slice < nSlices }

// Learn takes v, in seconds, as normal. Values that are no duration are ignored.
func (s *Series) Learn(v float64) {
	if !valid(v) {
		return
	}
	p := s.current()
	add(&p.learned, v)
	p.n++
	if s.parent != nil {
		s.parent.Learn(v)
	}
}

// Defer takes v, in seconds, as a lone spike: it is learned only if lone spikes
// go on for half a window, or a few of them would hide the next.
func (s *Series) Defer(v float64) {
	s.leaveOut(v, func(p *part) (*sketch, *int) { return &p.deferred, &p.nLater })
	if s.parent != nil {
		s.parent.Defer(v)
	}
}

// Exclude takes v, in seconds, as part of an incident: it is learned only if
// incidents are most of what there is for half a window.
func (s *Series) Exclude(v float64) {
	s.leaveOut(v, func(p *part) (*sketch, *int) { return &p.excluded, &p.nOut })
	if s.parent != nil {
		s.parent.Exclude(v)
	}
}

// leaveOut counts v where the function says. A series with too few values to
// judge by learns it all the same, or an operation unlike the rest of its
// service would never get to know itself.
func (s *Series) leaveOut(v float64, where func(*part) (*sketch, *int)) {
	if !valid(v) {
		return
	}
	p := s.current()
	to, n := &p.learned, &p.n
	if s.refresh().count >= s.book.cfg.MinSamples {
		to, n = where(p)
	}
	add(to, v)
	*n++
}

// Judge tells whether v, in seconds, stands out: from the series, or its
// parent, or the fallback threshold if fallback says that one makes sense.
func (s *Series) Judge(v float64, fallback bool) Verdict {
	if !valid(v) {
		return Verdict{State: None}
	}
	need := s.book.cfg.MinSamples
	if sum := s.refresh(); sum.count >= need {
		return Verdict{v > sum.limit, sum.quantile, sum.limit, Own}
	}
	if s.parent != nil {
		if sum := s.parent.refresh(); sum.count >= need {
			return Verdict{v > sum.limit, sum.quantile, sum.limit, Parent}
		}
	}
	if !fallback {
		return Verdict{State: None}
	}
	limit := s.book.cfg.FallbackThreshold
	return Verdict{Exceeds: v > limit, Threshold: limit, State: Fallback}
}

// refresh returns the summary, computed anew when the slice has changed, when
// the values become enough, and from then on when enough have come since.
func (s *Series) refresh() *summary {
	cur := s.current()
	if s.cache.slice == s.book.slice {
		added := cur.n - s.cache.n
		if s.cache.count < s.book.cfg.MinSamples {
			if s.cache.count+added < s.book.cfg.MinSamples {
				return &s.cache
			}
		} else if float64(added) < refreshShare*float64(s.cache.count) {
			return &s.cache
		}
	}
	var all sketch
	sum := summary{slice: s.book.slice, n: cur.n}
	for i := range s.ring {
		if p := &s.ring[i]; s.live(p) {
			merge(&all, p.learned)
			sum.count += p.n
		}
	}
	// Too few for an opinion: the rest of the summary is not needed.
	if all != nil && sum.count >= s.book.cfg.MinSamples {
		sum.quantile, sum.limit = s.book.cfg.limits(all)
	}
	s.cache = sum
	return &s.cache
}

// count returns the number of values learned in the window.
func (s *Series) count() int {
	n := 0
	for i := range s.ring {
		if p := &s.ring[i]; s.live(p) {
			n += p.n
		}
	}
	return n
}

// limits returns the quantile and the value above which one stands out,
//
//	max(factor·quantile, median + 6·MAD, median + min_excess)
//
// The last term keeps stages that are nearly always zero from flagging.
func (c *Config) limits(all sketch) (quantile, limit float64) {
	median := at(all, 0.5)
	quantile = at(all, c.Quantile)
	return quantile, max(c.Factor*quantile, median+madFactor*mad(all, median), median+c.MinExcess)
}

func at(s sketch, q float64) float64 {
	v, err := s.GetValueAtQuantile(q)
	if err != nil {
		return 0 // empty
	}
	return v
}

// mad is the median absolute deviation from the median, from the sketch's bins.
func mad(s sketch, median float64) float64 {
	type bin struct{ dist, n float64 }
	var bins []bin
	s.ForEach(func(v, n float64) bool {
		bins = append(bins, bin{math.Abs(v - median), n})
		return false
	})
	slices.SortFunc(bins, func(a, b bin) int { return cmp.Compare(a.dist, b.dist) })
	half := s.GetCount() / 2
	for _, b := range bins {
		if half -= b.n; half <= 0 {
			return b.dist
		}
	}
	return 0
}

// adapt learns what was left out, once it has lasted for half a window. Lone
// spikes in each slice of it are part of what is normal; an incident that was
// more than all else in each slice is what is normal now, and what was normal
// before is forgotten. It reports a quantile that is now above the old limit, or
// comes from an incident.
func (s *Series) adapt() (before, after float64, ok bool) {
	last := make([]*part, nSlices/2)
	out := 0
	recurring, lasting := true, true
	for i := range last {
		number := s.book.slice - uint32(i)
		p := &s.ring[number%nSlices]
		if p.slice != number {
			return 0, 0, false
		}
		recurring = recurring && p.nLater > 0
		lasting = lasting && p.nOut > p.n+p.nLater
		out += p.nOut
		last[i] = p
	}
	lasting = lasting && out >= s.book.cfg.MinSamples
	if !recurring && !lasting {
		return 0, 0, false
	}
	old := *s.refresh()
	for _, p := range last {
		if recurring {
			merge(&p.learned, p.deferred)
			p.n += p.nLater
			p.deferred, p.nLater = nil, 0
		}
		if lasting {
			p.learned, p.n = p.excluded, p.nOut
			p.excluded, p.nOut = nil, 0
		}
	}
	for i := range s.ring {
		if p := &s.ring[i]; lasting && s.book.slice-p.slice >= nSlices/2 {
			*p = part{}
		}
	}
	s.cache = summary{}
	now := s.refresh()
	return old.quantile, now.quantile, lasting || now.quantile > old.limit
}

// Package baseline knows what is normal: it holds one rolling distribution per
// service, operation and stage and tells whether a value stands out from it.
//
// A distribution covers the last Window in a few slices, each a quantile sketch
// with 1 % relative error; the oldest slice is forgotten as a new one begins.
//
// A spike must not raise the baseline that the next one is judged by, so the
// caller says of each value what it was: Learn for a normal one, Defer for a lone
// spike, Exclude for one of an incident. What was left out is kept aside, and
// learned when it lasts for half a window: then it is what is normal now.
package baseline

import (
	"cmp"
	"container/list"
	"slices"
	"strings"
	"time"
)

// Every is the operation of a service's parent series, which hold the values of
// all its operations. A new operation may be judged by them until it has values
// enough of its own.
const Every = "*"

// nSlices is the number of parts a window rotates in. The distribution covers
// between 5/6 of the window and all of it.
const nSlices = 6

// Config sets what stands out. Durations of values are in seconds.
type Config struct {
	Quantile          float64       // (0,1): the upper end of normal
	Factor            float64       // ≥ 1: a value above Factor times the quantile may stand out
	Window            time.Duration // how far back the distribution reaches
	MinSamples        int           // values below which a series has no opinion
	MinExcess         float64       // seconds above the median a value must lie
	FallbackThreshold float64       // seconds, while neither the series nor its parent has an opinion
	MaxSeries         int           // bound on the number of series, parents included
}

// State says by what a value was judged.
type State uint8

// The states, in the order in which they are tried.
const (
	Own      State = iota // the series' own distribution
	Parent                // the service's distribution of that stage, over all operations
	Fallback              // the fixed fallback threshold
	None                  // nothing: too few values, and no fallback asked for
)

// String returns the state as exported in spike.baseline.state.
func (s State) String() string {
	switch s {
	case Own:
		return "own"
	case Parent:
		return "parent"
	case Fallback:
		return "fallback"
	default:
		return "none"
	}
}

// Verdict is what a value was found to be.
type Verdict struct {
	Exceeds   bool
	Baseline  float64 // seconds: the quantile, or 0 if the state is Fallback or None
	Threshold float64 // seconds: the value had to be above this
	State     State
}

// Change is a lasting change of level that a series has adapted to.
type Change struct {
	Service, Operation, Stage string
	Before, After             float64 // seconds: the quantile
}

// Book holds the series of all services. It is not safe for concurrent use, and
// its clock is the caller's: time passes at Step only.
type Book struct {
	cfg     Config
	groups  map[groupKey]*Group
	lru     *list.List // of *Group, most recently used first
	series  int
	evicted int64
	rotated time.Time // start of the current slice
	slice   uint32    // number of the current slice, ever growing
}

type groupKey struct{ service, operation string }

// Group is the series of one operation of a service.
type Group struct {
	key    groupKey
	book   *Book
	parent *Group // nil for a parent
	series map[string]*Series
	elem   *list.Element
	kids   int // groups that have this one as parent
	saved  int // state when it was last saved
}

// New returns an empty book whose first slice begins at start.
func New(cfg Config, start time.Time) *Book {
	return &Book{
		cfg: cfg, groups: map[groupKey]*Group{}, lru: list.New(),
		rotated: start, slice: nSlices, // so that nSlices ago is never below zero
	}
}

// Group returns the series of an operation; for Every, those of the service. It
// is valid until the next call of Group: it may be the one that goes when the
// book is full.
func (b *Book) Group(service, operation string) *Group {
	if g, ok := b.groups[groupKey{service, operation}]; ok {
		b.lru.MoveToFront(g.elem)
		return g
	}
	p, ok := b.groups[groupKey{service, Every}]
	if !ok {
		p = b.add(groupKey{strings.Clone(service), Every}, nil)
	}
	if operation == Every {
		return p
	}
	p.kids++
	return b.add(groupKey{p.key.service, strings.Clone(operation)}, p)
}

func (b *Book) add(k groupKey, parent *Group) *Group {
	g := &Group{key: k, book: b, parent: parent, series: map[string]*Series{}}
	g.elem = b.lru.PushFront(g)
	b.groups[k] = g
	return g
}

// trim makes room for one more series by forgetting the least recently used
// operations, except the one in use. A parent goes with its last operation.
func (b *Book) trim() {
	for e := b.lru.Back(); e != b.lru.Front() && b.series >= b.cfg.MaxSeries; {
		old := e.Value.(*Group)
		e = e.Prev()
		if old.kids > 0 {
			continue
		}
		b.drop(old)
		if p := old.parent; p != nil {
			if p.kids--; p.kids == 0 {
				b.drop(p)
				e = b.lru.Back() // e may have been p
			}
		}
	}
}

func (b *Book) drop(g *Group) {
	b.evicted += int64(len(g.series))
	b.series -= len(g.series)
	b.lru.Remove(g.elem)
	delete(b.groups, g.key)
}

// Series returns the series of a stage. A new one asks the service's series of
// that stage while it has too few values, if askParent says that operations are
// alike in it. The stage should be a constant or otherwise from a small set: a
// group has no bound of its own.
func (g *Group) Series(stage string, askParent bool) *Series {
	if s, ok := g.series[stage]; ok {
		return s
	}
	g.book.trim()
	s := &Series{book: g.book}
	if askParent && g.parent != nil {
		s.parent = g.parent.Series(stage, false)
	}
	g.series[stage] = s
	g.book.series++
	return s
}

// Step lets time pass: slices rotate, thresholds are computed anew when next
// asked for. It returns the changes of level that were adapted to.
func (b *Book) Step(now time.Time) []Change {
	width := b.cfg.Window / nSlices
	n := int(now.Sub(b.rotated) / width)
	if n <= 0 {
		return nil
	}
	b.rotated = b.rotated.Add(time.Duration(n) * width)
	var changes []Change
	for e := b.lru.Front(); e != nil; e = e.Next() {
		g := e.Value.(*Group)
		for name, s := range g.series {
			if before, after, ok := s.adapt(); ok {
				changes = append(changes, Change{g.key.service, g.key.operation, name, before, after})
			}
		}
	}
	slices.SortFunc(changes, func(a, b Change) int {
		return cmp.Or(strings.Compare(a.Service, b.Service), strings.Compare(a.Operation, b.Operation), strings.Compare(a.Stage, b.Stage))
	})
	b.slice += uint32(min(n, nSlices))
	return changes
}

// Stats counts the series by whether they have values enough to judge by, and
// those forgotten since the start because the book was full.
func (b *Book) Stats() (own, warming int, evicted int64) {
	for e := b.lru.Front(); e != nil; e = e.Next() {
		for _, s := range e.Value.(*Group).series {
			if s.count() >= b.cfg.MinSamples {
				own++
			} else {
				warming++
			}
		}
	}
	return own, warming, b.evicted
}

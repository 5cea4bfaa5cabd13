package assemble

import (
	"cmp"
	"slices"

	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// A stall of a thread delays whoever it serves: the requests in flight on it,
// and those whose bytes it has not read yet. The latter are known only once it
// has read them, so a stall is held for a while before it is given on, and with
// it the end of the requests that it delayed.

// Bounds of what is held.
const (
	// Settle is how long, in nanoseconds, a stall is held after the latest request
	// was found that it delayed: an event loop then works off what came meanwhile.
	Settle = uint64(250e6)
	// MaxSettle is how long at the most. With the spike_sampling processor's least
	// cluster_wait, eps and a stride, what a stall delayed still meets its neighbours.
	MaxSettle = 3 * Settle
	// MaxStalls are held at one time; the oldest goes when there are more.
	MaxStalls = 4096
	// MaxOthers bounds Occurrence.Others.
	MaxOthers = 32
)

// stall is one stretch of a stage on one thread, or of a whole process.
type stall struct {
	key        stallKey
	start, end uint64
	born, due  uint64
	delayed    []*delay
}

// stallKey finds a stall: a thread is in one stage at one time, so what overlaps
// on one thread and in one stage is one stall.
type stallKey struct {
	id    uint32 // of the thread, or of the process if it is stopped as a whole
	wide  bool
	stage stage.Stage
}

// delay is a request's part in a stall.
type delay struct {
	request *request
	told    *probe.Occurrence
	pieces  []piece
}

// everyone gives a stall to all requests in flight on its lane, or in its process
// where it has none.
func (a *Assembler) everyone(e *probe.Occurrence) {
	told := *e // the event is the probe's
	var on []*request
	if e.Lane != (probe.Lane{}) {
		on = a.told(a.lanes[e.Lane])
	} else {
		for lane, requests := range a.lanes {
			if lane.PID == e.PID {
				on = append(on, a.told(requests)...)
			}
		}
		slices.SortFunc(on, func(x, y *request) int { return cmp.Or(cmp.Compare(x.Cookie, y.Cookie), cmp.Compare(x.Seq, y.Seq)) })
	}
	if len(on) > 0 || e.Lane == (probe.Lane{}) {
		a.hold(&told, e.Time, on...)
	}
}

// told are those of the requests on a lane that a stall there is given to. The others
// lack it, if they are in flight after all.
func (a *Assembler) told(requests []*request) []*request {
	for _, r := range requests {
		if a.doubtful(r) {
			r.problem(IncompleteLost)
		}
	}
	return a.known(requests)
}

// hold adds requests to the stall that was told of at a time.
func (a *Assembler) hold(e *probe.Occurrence, at uint64, requests ...*request) {
	s := a.stallOf(e, at)
	s.start, s.end = min(s.start, e.Start), max(s.end, e.Time)
	s.due = min(at+Settle, s.born+MaxSettle)
	for _, r := range requests {
		if pieces := a.pieces(r, e); len(pieces) > 0 {
			d := &delay{r, e, pieces}
			r.held = append(r.held, d)
			s.delayed = append(s.delayed, d)
		}
	}
}

// stallOf finds the stall that is held already, or begins one.
func (a *Assembler) stallOf(e *probe.Occurrence, at uint64) *stall {
	key := stallKey{id: e.TID, stage: e.Stage}
	process := stallKey{id: e.PID, stage: e.Stage, wide: true}
	if e.Cookie == 0 && e.Lane == (probe.Lane{}) {
		key = process
	}
	for _, k := range []stallKey{key, process} {
		for _, s := range slices.Backward(a.stalls[k]) {
			if e.Start < s.end && s.start < e.Time {
				return s
			}
		}
	}
	if len(a.held) >= MaxStalls {
		a.release(a.held[0])
		a.held = slices.Delete(a.held, 0, 1)
	}
	s := &stall{key: key, start: e.Start, end: e.Time, born: at}
	a.stalls[key] = append(a.stalls[key], s)
	a.held = append(a.held, s)
	return s
}

// releaseDue gives on the stalls that nobody will be added to any more.
func (a *Assembler) releaseDue(now uint64) {
	a.held = slices.DeleteFunc(a.held, func(s *stall) bool {
		if s.due > now {
			return false
		}
		a.release(s)
		return true
	})
}

// release gives on a stall to each request that it delayed, and lets those end
// that have waited for it.
func (a *Assembler) release(s *stall) {
	same := slices.DeleteFunc(a.stalls[s.key], func(other *stall) bool { return other == s })
	if len(same) == 0 {
		delete(a.stalls, s.key)
	} else {
		a.stalls[s.key] = same
	}

	var keys []Key // of the requests delayed, each once
	place := make(map[*request]int, len(s.delayed))
	for _, d := range s.delayed {
		d.trim(a.cfg.MinDuration)
		if _, ok := place[d.request]; !ok && len(d.pieces) > 0 {
			place[d.request] = len(keys)
			keys = append(keys, d.request.Key)
		}
	}
	n := len(keys)
	others := max(min(n-1, MaxOthers), 0)
	keys = append(keys, keys[:others]...) // so that behind each there are the next ones
	for _, d := range s.delayed {
		if i, ok := place[d.request]; ok {
			a.deliver(d.request, d.told, d.pieces, n, keys[i+1:i+1+others])
		}
	}
	for _, d := range s.delayed {
		r := d.request
		r.held = slices.DeleteFunc(r.held, func(other *delay) bool { return other == d })
		if len(r.held) == 0 && r.ended {
			a.give(r)
		}
	}
}

// trim leaves of the pieces what lies before the request's end, as far as it is
// long enough for a span; of a refused request nothing.
func (d *delay) trim(least int64) {
	r := d.request
	if r.Refused != "" {
		d.pieces = nil
		return
	}
	if !r.ended {
		return
	}
	d.pieces = slices.DeleteFunc(d.pieces, func(p piece) bool { return p.start >= r.End })
	for i := range d.pieces {
		p := &d.pieces[i]
		if p.end > r.End {
			p.stretch = max(p.stretch-int64(p.end-r.End), 0)
			p.end = r.End
		}
	}
	d.pieces = slices.DeleteFunc(d.pieces, func(p piece) bool { return p.length() < max(least, 1) })
}

package assemble

import (
	"cmp"
	"slices"

	"github.com/ebpfllm/ebpfllm/internal/probe"
)

// occurrence gives a stretch of a stage to whom it delayed: the request of its
// socket, or every request in flight on its lane.
func (a *Assembler) occurrence(e *probe.Occurrence) {
	if e.Cookie == 0 {
		a.everyone(e)
		return
	}
	c := a.conn(&e.Socket)
	if c == nil || c.ignored {
		return
	}
	if r := c.request; r != nil && r.begun && (e.Seq == 0 || e.Seq == r.Seq) && e.Start >= r.Start {
		a.deliver(r, e, 1)
		return
	}
	// the request that it belongs to has not been read yet
	if len(c.pending) < MaxPending {
		c.pending = append(c.pending, *e)
	}
}

// everyone gives an occurrence to all requests in flight on its lane, or in its
// process where it has none.
func (a *Assembler) everyone(e *probe.Occurrence) {
	var delayed []*request
	if e.Lane != (probe.Lane{}) {
		delayed = a.lanes[e.Lane]
	} else {
		for lane, on := range a.lanes {
			if lane.PID == e.PID {
				delayed = append(delayed, on...)
			}
		}
		slices.SortFunc(delayed, func(x, y *request) int { return cmp.Or(cmp.Compare(x.Cookie, y.Cookie), cmp.Compare(x.Seq, y.Seq)) })
	}
	for _, r := range delayed {
		a.deliver(r, e, len(delayed))
	}
}

// deliver gives on the parts of an occurrence that lie within the request and
// that no earlier one has taken: occurrences of a request never overlap.
func (a *Assembler) deliver(r *request, e *probe.Occurrence, shared int) {
	start := e.Start
	if e.Cookie == 0 {
		start = max(start, r.FirstRead) // before it, what the thread does is not this request's
	}
	start = max(start, r.Start)
	left := e.Duration
	for _, piece := range r.spans.take(start, e.Time) {
		duration := min(left, int64(piece.end-piece.start))
		left -= duration
		if duration < max(a.cfg.MinDuration, 1) {
			continue
		}
		if r.count == MaxOccurrences {
			r.problem(IncompleteSpans)
			return
		}
		r.count++
		pid := r.PID
		if e.Waker {
			pid = e.PID
		}
		a.sink.Occurrence(&Occurrence{
			Key: r.Key, PID: pid, TID: e.TID, Stage: e.Stage, Start: piece.start, End: piece.end,
			Duration: duration, Syscall: e.Syscall, Major: e.Major, SharedBy: shared, Waker: e.Waker,
		})
	}
}

type interval struct{ start, end uint64 }

// intervals are disjoint and sorted.
type intervals []interval

// take returns the parts of [start, end) that are still free, and occupies them.
func (s *intervals) take(start, end uint64) []interval {
	var free []interval
	// those that end before start are no matter
	i, _ := slices.BinarySearchFunc(*s, start, func(v interval, t uint64) int {
		if v.end <= t {
			return -1
		}
		return 1
	})
	at := start
	j := i
	for ; j < len(*s) && (*s)[j].start < end; j++ {
		if v := (*s)[j]; v.start > at {
			free = append(free, interval{at, v.start})
		}
		at = max(at, (*s)[j].end)
	}
	if at < end {
		free = append(free, interval{at, end})
	}
	if len(free) == 0 {
		return nil
	}
	merged := interval{start, end}
	if i < j {
		merged = interval{min(start, (*s)[i].start), max(end, (*s)[j-1].end)}
	}
	*s = slices.Replace(*s, i, j, merged)
	return free
}

package assemble

import (
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
		a.own(r, e, e.Time)
		return
	}
	// the request that it belongs to has not been read yet
	if len(c.pending) < MaxPending {
		c.pending = append(c.pending, *e)
	}
}

// own gives a request what was told of its own connection at a time: a stage of
// the socket is nobody else's, a stall of the thread before it read the request
// may have delayed others too.
func (a *Assembler) own(r *request, e *probe.Occurrence, at uint64) {
	if e.Stage.Socket() {
		a.deliver(r, e, a.pieces(r, e), 1, nil)
		return
	}
	told := *e // the event is the probe's
	a.hold(&told, at, r)
}

// piece is a part of an occurrence that is a request's.
type piece struct {
	start, end uint64
	duration   int64 // of the stage within it
}

// pieces returns the parts of an occurrence that lie within the request, that no
// earlier one has taken, since occurrences of a request never overlap, and that
// are long enough for a span.
func (a *Assembler) pieces(r *request, e *probe.Occurrence) []piece {
	start := max(e.Start, r.Start)
	if e.Cookie == 0 {
		start = max(start, r.FirstRead) // before it, what the thread does is not this request's
	}
	var list []piece
	left := e.Duration
	for _, free := range r.spans.take(start, e.Time) {
		p := piece{free.start, free.end, min(left, int64(free.end-free.start))}
		left -= p.duration
		if p.duration >= max(a.cfg.MinDuration, 1) {
			list = append(list, p)
		}
	}
	return list
}

// deliver gives on pieces of an occurrence that delayed so many requests, some of
// the others among them.
func (a *Assembler) deliver(r *request, e *probe.Occurrence, pieces []piece, shared int, others []Key) {
	for _, p := range pieces {
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
			Key: r.Key, PID: pid, TID: e.TID, Stage: e.Stage, Start: p.start, End: p.end,
			Duration: p.duration, Syscall: e.Syscall, Major: e.Major, SharedBy: shared, Others: others, Waker: e.Waker,
		})
	}
}

type interval struct{ start, end uint64 }

// intervals are disjoint and sorted.
type intervals []interval

// take returns the parts of [start, end) that are still free, and occupies them.
func (s *intervals) take(start, end uint64) []interval {
	if start >= end {
		return nil
	}
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

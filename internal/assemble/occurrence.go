package assemble

import (
	"slices"

	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
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
	a.hear(r, at)
	if e.Waker && e.Time > e.Start && e.Duration < int64(e.Time-e.Start) && len(r.inParts) < MaxPending {
		r.inParts = append(r.inParts, *e)
		return
	}
	a.place(r, e, at)
}

func (a *Assembler) place(r *request, e *probe.Occurrence, at uint64) {
	if e.Stage.Socket() {
		a.deliver(r, e, a.pieces(r, e), 1, nil)
		return
	}
	told := *e // the event is the probe's
	a.hold(&told, at, r)
}

// placeParts places the occurrences that came in parts. Where exactly their time
// lies is not known, so they come after all those of the same reading of which it
// is, and get what these have left.
func (a *Assembler) placeParts(r *request) {
	for i := range r.inParts {
		a.place(r, &r.inParts[i], r.heard)
	}
	r.inParts = nil
}

// piece is a part of an occurrence that is a request's. All of it is the stage's
// time.
type piece struct {
	start, end uint64
	stretch    int64 // see Occurrence.Stretch
}

func (p *piece) length() int64 { return int64(p.end - p.start) }

// An occurrence may be several stretches of a stage that are told together, with
// the time of other stages between them. Its span is as long as the stage's time
// in it, and so never tells of more than there was.
const (
	// gaps is the share, one in so many, that other stages may have and the
	// occurrence still counts as one stretch: its place is known well enough.
	gaps = 8
	// sparse is how many times as long as the stage's time an occurrence may be, with
	// others' time in between, and still have a span: beyond that, no place for it is true.
	sparse = 4
)

// pieces returns the parts of an occurrence that lie within the request, that no
// earlier one has taken, since occurrences of a request never overlap, and that
// are long enough for a span: together as long as the stage's time, and as late as can be,
// since it is known of an occurrence that the stage's time ends with it.
func (a *Assembler) pieces(r *request, e *probe.Occurrence) []piece {
	start := max(e.Start, r.Start)
	if e.Cookie == 0 {
		start = max(start, r.FirstRead) // before it, what the thread does is not this request's
	}
	free := r.spans.free(start, e.Time)
	var room int64
	for _, f := range free {
		room += int64(f.end - f.start)
	}
	left := min(e.Duration, room)
	if left <= 0 || left < room/sparse {
		return nil
	}
	inParts := left < room-room/gaps
	var list []piece
	for _, f := range slices.Backward(free) {
		if left <= 0 {
			break
		}
		p := piece{start: max(f.start, f.end-min(uint64(left), f.end)), end: f.end}
		left -= p.length()
		r.spans.take(p.start, p.end)
		if inParts {
			p.stretch = int64(p.end - start)
		}
		if p.length() >= max(a.cfg.MinDuration, 1) {
			list = append(list, p)
		}
	}
	slices.Reverse(list)
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
		r.given.add(e, p)
		pid := r.PID
		if e.Waker {
			pid = e.PID
		}
		a.sink.Occurrence(&Occurrence{
			Key: r.Key, PID: pid, TID: e.TID, Stage: e.Stage, Start: p.start, End: p.end, Stretch: p.stretch,
			Duration: p.length(), Syscall: e.Syscall, Major: e.Major, SharedBy: shared, Others: others, Waker: e.Waker,
		})
	}
}

// proof is what occurrences prove of a request's time, in nanoseconds.
type proof struct {
	stages stage.Times
	major  int64 // of page faults that waited for I/O
}

func (p *proof) add(e *probe.Occurrence, part piece) {
	p.stages[e.Stage] += part.length()
	if e.Major {
		p.major += part.length()
	}
}

type interval struct{ start, end uint64 }

// intervals are disjoint and sorted.
type intervals []interval

// overlapping are the places of those that overlap [start, end): from i up to j.
func (s intervals) overlapping(start, end uint64) (i, j int) {
	i, _ = slices.BinarySearchFunc(s, start, func(v interval, t uint64) int {
		if v.end <= t {
			return -1
		}
		return 1
	})
	for j = i; j < len(s) && s[j].start < end; j++ {
	}
	return i, j
}

// free returns the parts of [start, end) that are not taken.
func (s intervals) free(start, end uint64) []interval {
	if start >= end {
		return nil
	}
	var free []interval
	i, j := s.overlapping(start, end)
	for _, v := range s[i:j] {
		if v.start > start {
			free = append(free, interval{start, v.start})
		}
		start = max(start, v.end)
	}
	if start < end {
		free = append(free, interval{start, end})
	}
	return free
}

// take occupies [start, end), with what is taken of it already.
func (s *intervals) take(start, end uint64) {
	if start >= end {
		return
	}
	i, j := s.overlapping(start, end)
	if i < j {
		start, end = min(start, (*s)[i].start), max(end, (*s)[j-1].end)
	}
	*s = slices.Replace(*s, i, j, interval{start, end})
}

package assemble

import (
	"slices"

	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// settle turns the last reading into the request's result: stages that do not
// overlap and sum, with Unattributed, to its wall time.
func (r *request) settle(unavailable []stage.Stage) {
	p := &r.last
	r.settleLoss()
	r.SoftirqDelay, r.RemoteFaults = p.SoftirqDelay, p.RemoteFaults
	r.End = max(p.Time, r.Start)
	r.BytesIn, r.BytesOut = p.Received, p.Sent
	r.Streaming = r.response != nil && (r.response.EventStream || r.response.Chunked && r.Chunks > 1)
	r.MajorFault = max(p.Major, 0)
	r.quantiles()

	r.Missing = slices.Clone(unavailable)
	if p.NoLane {
		// what the serving thread did is not known, or not all of it
		for s := stage.CPU; s <= stage.Wait; s++ {
			r.miss(s)
		}
	}
	if p.NoAccept {
		r.miss(stage.AcceptQueue)
	}
	if p.UnseenRead {
		// when its bytes were read is not known, and so not what was waited for until then
		r.miss(stage.RequestBody)
		r.miss(stage.ReceiveQueue)
		r.miss(stage.Wait)
	}
	slices.Sort(r.Missing)

	r.Exclusive, r.Waker, r.Plain = p.Exclusive, p.Waker, p.Plain
	r.Exclusive[stage.Unknown], r.Exclusive[stage.Unattributed] = 0, 0
	var sum int64
	for s := range r.Exclusive {
		r.Exclusive[s] = max(r.Exclusive[s], 0)
		if slices.Contains(r.Missing, stage.Stage(s)) {
			r.Exclusive[s], r.Plain[s] = 0, 0
		}
		sum += r.Exclusive[s]
	}
	wall := int64(r.End - r.Start)
	// The reading is taken some microseconds after the last byte left, when the
	// call returns: what it has too much is the processor time of the return.
	for _, s := range slices.Backward(trim) {
		if sum <= wall {
			break
		}
		cut := min(r.Exclusive[s], sum-wall)
		r.Exclusive[s] -= cut
		sum -= cut
	}
	r.Exclusive[stage.Unattributed] = wall - sum
	if p.NoLane && !r.moved {
		r.prove(stage.CPU, stage.Wait)
	}
	if p.UnseenRead {
		r.prove(stage.RequestBody, stage.ReceiveQueue)
	}
	for s := range r.Waker {
		r.Waker[s] = min(max(r.Waker[s], 0), r.Exclusive[s])
	}
	r.MajorFault = min(r.MajorFault, r.Exclusive[stage.PageFault])

	if p.Lost {
		r.problem(IncompleteLost)
	}
}

// prove gives each stage from first to last, of which the account is not known, what the
// request's occurrences prove of it: those of a thread that has ended before the request
// did, or of bytes that were read unseen. It is at least so much; nothing shorter than an
// occurrence is in it.
func (r *request) prove(first, last stage.Stage) {
	proven := r.given
	for _, d := range r.held {
		for _, p := range d.pieces {
			if p.start < r.End {
				p.end = min(p.end, r.End)
				proven.add(d.told, p)
			}
		}
	}
	for s := first; s <= last; s++ {
		d := min(proven.stages[s], r.Exclusive[stage.Unattributed])
		if d <= 0 {
			continue
		}
		r.Missing = slices.DeleteFunc(r.Missing, func(m stage.Stage) bool { return m == s })
		r.Exclusive[s] += d
		r.Exclusive[stage.Unattributed] -= d
	}
	r.MajorFault = max(r.MajorFault, proven.major)
}

// trim lists the stages in the order in which they keep their time when the sum
// is too large: the processor's first to give, then the weakest claims.
var trim = func() []stage.Stage {
	order := slices.DeleteFunc(slices.Clone(stage.Precedence), func(s stage.Stage) bool { return s == stage.CPU })
	return append(order, stage.CPU)
}()

func (r *request) miss(s stage.Stage) {
	if !slices.Contains(r.Missing, s) {
		r.Missing = append(r.Missing, s)
	}
}

// quantiles of the gaps, by the nearest rank, exact over GapValues.
func (r *request) quantiles() {
	if len(r.GapValues) == 0 {
		return
	}
	sorted := slices.Sorted(slices.Values(r.GapValues))
	rank := func(q float64) int64 {
		i := int(q*float64(len(sorted))+0.9999999) - 1
		return sorted[min(max(i, 0), len(sorted)-1)]
	}
	r.Gaps.P50, r.Gaps.P99 = rank(0.50), rank(0.99)
}

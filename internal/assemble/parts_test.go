package assemble

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// waker is a stretch of a thread that the request's thread waited for, with so
// many ms of the stage in it.
func waker(s stage.Stage, from, to, of uint64) *probe.Occurrence {
	e := stretch(1, probe.Lane{}, s, from, to)
	e.Seq, e.PID, e.TID, e.Waker, e.Duration = 1, 70, 71, true, int64(of*ms)
	return e
}

func TestASpanIsAsLongAsItsStagesTime(t *testing.T) {
	for _, c := range []struct {
		name string
		told []probe.Event
		want []string // stage from-to, and in parts since
	}{
		{"in one stretch", []probe.Event{waker(stage.Lock, 20, 80, 60)}, []string{"lock 20-80"}},
		{"with a gap that is hardly one", []probe.Event{waker(stage.Lock, 20, 80, 55)}, []string{"lock 25-80"}},
		{"in parts: as late as can be, and labelled", []probe.Event{waker(stage.RunQueue, 20, 80, 24)}, []string{"run_queue 56-80 since 20"}},
		{"too sparse for a place", []probe.Event{waker(stage.PageFault, 20, 220, 15)}, nil},
		{"in parts, around others told later", []probe.Event{waker(stage.RunQueue, 20, 80, 24), waker(stage.Lock, 60, 80, 20)}, []string{"run_queue 36-60 since 20", "lock 60-80"}},
		{"two in parts share the time", []probe.Event{waker(stage.RunQueue, 20, 80, 30), waker(stage.PageFault, 20, 80, 30)}, []string{"page_fault 20-50", "run_queue 50-80 since 20"}},
		{"what leaves others their time is in one stretch but for them", []probe.Event{waker(stage.Lock, 20, 70, 50), waker(stage.PageFault, 20, 80, 10)}, []string{"lock 20-70", "page_fault 70-80"}},
		{"never more than others leave", []probe.Event{waker(stage.Lock, 20, 75, 55), waker(stage.PageFault, 20, 80, 10)}, []string{"lock 20-75", "page_fault 75-80"}},
		{"of the request's own thread too", []probe.Event{func() *probe.Occurrence {
			e := stretch(0, thread, stage.PageFault, 20, 80)
			e.Duration = 20 * ms
			return e
		}()}, []string{"page_fault 60-80 since 20"}},
		{"more time than there is", []probe.Event{waker(stage.Lock, 20, 80, 500)}, []string{"lock 20-80"}},
		{"no time", []probe.Event{waker(stage.Lock, 20, 80, 0)}, nil},
		{"too short", []probe.Event{func() *probe.Occurrence {
			e := waker(stage.Lock, 20, 22, 0)
			e.Duration = ms - 1
			return e
		}()}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			var l log
			a := New(Config{MinDuration: ms}, &l)
			r := asked(1, 1, 10, get)
			feed(a, r)
			feed(a, c.told...)
			feed(a, whole(r, 300)...)
			settle(a)
			slices.SortFunc(l.occurrences, func(a, b Occurrence) int { return cmp.Compare(a.Start, b.Start) })
			var got []string
			for _, o := range l.occurrences {
				assert.EqualValues(t, o.End-o.Start, o.Duration)
				text := fmt.Sprintf("%s %d-%d", o.Stage, o.Start/ms, o.End/ms)
				if o.Stretch != 0 {
					text += fmt.Sprintf(" since %d", (int64(o.End)-o.Stretch)/ms)
				}
				got = append(got, text)
			}
			assert.Equal(t, c.want, got)
			assert.Empty(t, l.problems)
			assert.Len(t, l.finished, 1)
		})
	}
}

func TestWhatIsToldInPartsIsBounded(t *testing.T) {
	var l log
	a := New(Config{MinDuration: ms}, &l)
	r := asked(1, 1, 10, get)
	feed(a, r)
	for i := range uint64(2 * MaxPending) {
		feed(a, waker(stage.Lock, 20+10*i, 30+10*i, 5))
	}
	assert.Len(t, a.conns[1].request.inParts, MaxPending)
	feed(a, whole(r, 9000)...)
	settle(a)
	assert.Len(t, l.occurrences, 2*MaxPending, "the rest are placed at once")
}

// A thread goes through stages at random and so do those that it waits for. The
// kernel's records of it are joined as the kernel may join them: spans never tell
// of more of a stage than the request's total does.
func TestSpansOfAStageAreNeverLongerThanItsTotal(t *testing.T) {
	stalls := []stage.Stage{stage.RunQueue, stage.PageFault, stage.Reclaim, stage.BlockIO, stage.Lock, stage.Syscall}
	for seed := range uint64(2000) {
		random := rand.New(rand.NewPCG(seed, 1))
		var l log
		a := New(Config{MinDuration: ms}, &l)
		head := asked(1, 1, 10, get)
		reading := sent(head, 0, 0)
		reading.Exclusive = stage.Times{}
		var events []*probe.Occurrence
		open := map[stage.Stage]*probe.Occurrence{} // of the waker's, one a stage, as they are handed on
		now := head.Time
		for range 1 + random.IntN(40) {
			length := uint64(random.Int64N(12 * ms))
			s := stage.CPU
			if random.IntN(3) > 0 {
				s = stalls[random.IntN(len(stalls))]
			}
			reading.Exclusive[s] += int64(length)
			switch e := open[s]; {
			case s == stage.CPU:
			case random.IntN(2) == 0: // its own
				events = append(events, &probe.Occurrence{
					Socket: probe.Socket{Time: now + length}, PID: 7, TID: 8, Lane: thread, Stage: s, Start: now, Duration: int64(length), Syscall: -1,
				})
			case e == nil || random.IntN(4) == 0: // the waker's
				e = &probe.Occurrence{
					Socket: probe.Socket{Cookie: 1, Seq: 1, Time: now + length}, PID: 70, TID: 71, Stage: s, Start: now, Duration: int64(length), Syscall: -1, Waker: true,
				}
				open[s] = e
				events = append(events, e)
			default:
				e.Time, e.Duration = now+length, e.Duration+int64(length)
			}
			now += length
		}
		random.Shuffle(len(events), func(i, j int) { events[i], events[j] = events[j], events[i] })
		reading.Time, reading.Sent = now, uint64(len(ok)+2)
		feed(a, head)
		for _, e := range events {
			if e.Duration >= ms { // shorter ones have no record
				feed(a, e)
			}
		}
		feed(a, answered(1, 1, now/ms, ok), reading)
		settle(a)
		r := only(t, l.finished)
		var told stage.Times
		for i, o := range l.occurrences {
			told[o.Stage] += int64(o.End - o.Start)
			require.True(t, o.Start >= r.Start && o.End <= r.End, "seed %d: %+v is not within %+v", seed, o, r)
			for _, p := range l.occurrences[:i] {
				require.True(t, o.End <= p.Start || p.End <= o.Start, "seed %d: %+v overlaps %+v", seed, o, p)
			}
		}
		for s, ns := range told {
			require.LessOrEqual(t, ns, r.Exclusive[s], "seed %d: %s in %+v", seed, stage.Stage(s), l.occurrences)
		}
		require.Empty(t, l.problems)
	}
}

// A thread that has ended before its connection's end takes its account with it:
// what the spans prove is all that is known of it, and the totals say the same.
func TestATotalHasWhatSpansProveIfTheThreadsAccountIsGone(t *testing.T) {
	for _, c := range []struct {
		name   string
		before uint64 // ms by which the stall ended before the connection did
	}{{"still held", 1}, {"given on long since", 2000}} {
		t.Run(c.name, func(t *testing.T) {
			var l log
			a := New(Config{MinDuration: ms}, &l)
			r := asked(1, 1, 10, get)
			fault := stretch(0, thread, stage.PageFault, 250, 260)
			fault.Major = true
			feed(a, r, stretch(0, thread, stage.Lock, 20, 220), fault)
			end := 260 + c.before
			feed(a, &probe.Tick{Now: (end - 1) * ms})
			p := sent(r, end, 0)
			p.Exclusive, p.NoLane = stage.Times{}, true
			feed(a, p, &probe.Close{Socket: socket(1, 1, end), Drained: true, Final: true})
			settle(a)
			got := only(t, l.finished)
			assert.Equal(t, []string{"1 lock 20-220/1", "1 page_fault 250-260/1"}, spans(&l))
			assert.EqualValues(t, 200*ms, got.Exclusive[stage.Lock])
			assert.EqualValues(t, 10*ms, got.Exclusive[stage.PageFault])
			assert.EqualValues(t, 10*ms, got.MajorFault)
			assert.EqualValues(t, (end-9-210)*ms, got.Exclusive[stage.Unattributed])
			assert.NotContains(t, got.Missing, stage.Lock)
			assert.NotContains(t, got.Missing, stage.PageFault)
			assert.Contains(t, got.Missing, stage.CPU, "of it nothing is known")
			assert.Equal(t, []string{IncompleteAborted}, got.Incomplete)
		})
	}
}

// Whose doing the request's time was until another thread sent its answer is not
// known: neither totals nor spans say so.
func TestStallsOfAThreadThatHandedTheRequestOverHaveNoSpans(t *testing.T) {
	var l log
	a := New(Config{MinDuration: ms}, &l)
	r := asked(1, 1, 10, get)
	feed(a, r, before(1, stage.RunQueue, 9, 10), stretch(0, thread, stage.Lock, 20, 80))
	r.Lane = probe.Lane{PID: 7, ID: 9}
	p := sent(r, 100, len(ok)+2)
	p.Exclusive = stage.Times{stage.RunQueue: ms}
	feed(a, answered(1, 1, 90, ok), onThread(9, stretch(0, r.Lane, stage.Lock, 30, 90)), p)
	settle(a)
	assert.Equal(t, []string{"1 run_queue 9-10/1"}, spans(&l))
	assert.EqualValues(t, 90*ms, only(t, l.finished).Exclusive[stage.Unattributed])
	assert.Empty(t, l.problems)
}

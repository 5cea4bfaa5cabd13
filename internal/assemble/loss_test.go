package assemble

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// answeredWhole feeds a request whose last byte reached the device at 20 ms, and whose
// kernel would send again after rto ms what is not acknowledged.
func answeredWhole(a *Assembler, rto uint64) {
	r := asked(1, 1, 10, get)
	p := sent(r, 20, len(ok)+2)
	p.Unacked = rto * ms
	feed(a, r, answered(1, 1, 12, ok), p)
}

// resent says at a time in ms that bytes of the request were sent again, or that
// it is over.
func resent(at uint64, over, acked bool) *probe.Retransmit {
	return &probe.Retransmit{
		Socket: socket(1, 1, at), Start: 19 * ms, Plain: int64(at-19) * ms, Retransmits: 2, Over: over, Acked: acked,
	}
}

func tick(at uint64) *probe.Tick { return &probe.Tick{Now: at * ms} }

func TestALostResponseEndsWithItsAcknowledgement(t *testing.T) {
	var l log
	a := New(Config{}, &l)
	answeredWhole(a, 200)
	assert.Empty(t, l.finished, "its last bytes may yet prove lost")
	feed(a, resent(221, false, false), tick(500))
	assert.Empty(t, l.finished, "the client does not have it yet")
	feed(a, resent(620, true, true))
	r := only(t, l.finished)
	assert.EqualValues(t, 620*ms, r.End)
	assert.EqualValues(t, 600*ms, r.Exclusive[stage.Retransmit], "all since the last byte was handed over")
	assert.EqualValues(t, 601*ms, r.Plain[stage.Retransmit])
	assert.EqualValues(t, 11*ms, r.Exclusive[stage.CPU], "no thread time is charged after the last byte")
	assert.Zero(t, r.Exclusive[stage.Unattributed])
	assert.Equal(t, 2, r.Retransmits)
	assert.Empty(t, r.Incomplete)
}

func TestAWholeResponseIsGivenOnWhenNothingCanProveLost(t *testing.T) {
	for _, c := range []struct {
		name string
		then []probe.Event
		cfg  Config
	}{
		{name: "the time is over", then: []probe.Event{tick(20 + 200 + lossSlack/ms)}},
		{name: "the client asks again", then: []probe.Event{asked(1, 2, 40, get)}},
		{name: "the client is gone", then: []probe.Event{&probe.Close{Socket: socket(1, 1, 50), Drained: true, Final: true}}},
		{name: "the client has acknowledged everything", then: []probe.Event{&probe.Close{Socket: socket(1, 1, 50), Drained: true, Acked: true}}},
		{name: "retransmissions are not seen", cfg: Config{Unavailable: []stage.Stage{stage.Retransmit}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var l log
			a := New(c.cfg, &l)
			answeredWhole(a, 200)
			if c.then != nil {
				feed(a, tick(30))
				assert.Empty(t, l.finished)
			}
			feed(a, c.then...)
			r := only(t, l.finished)
			assert.EqualValues(t, 20*ms, r.End)
			assert.Empty(t, r.Incomplete)
			feed(a, tick(10_000))
			assert.Len(t, l.finished, 1, "once")
		})
	}
}

func TestAWholeResponseHoldsNoLane(t *testing.T) {
	var l log
	a := New(Config{MinDuration: ms}, &l)
	answeredWhole(a, 200)
	feed(a, stretch(0, thread, stage.Lock, 30, 60))
	assert.Empty(t, l.occurrences, "what its thread does now is another's")
}

func TestALossThatIsGivenUpIsAborted(t *testing.T) {
	var l log
	a := New(Config{}, &l)
	answeredWhole(a, 200)
	feed(a, resent(221, false, false), resent(900, true, false), &probe.Close{Socket: socket(1, 1, 900), Final: true})
	r := only(t, l.finished)
	assert.Equal(t, []string{IncompleteAborted}, r.Incomplete)
	assert.EqualValues(t, 900*ms, r.End)
	assert.EqualValues(t, 880*ms, r.Exclusive[stage.Retransmit])
}

func TestALossInTheMiddleDoesNotMoveTheEnd(t *testing.T) {
	var l log
	a := New(Config{}, &l)
	r := asked(1, 1, 10, get)
	first, last := sent(r, 20, len(ok)+1), sent(r, 400, len(ok)+2)
	last.Retransmits, last.Plain[stage.Retransmit] = 2, 101*ms
	feed(a, r, answered(1, 1, 12, ok), first, resent(60, false, false), resent(120, true, true), last)
	got := only(t, l.finished)
	assert.EqualValues(t, 400*ms, got.End)
	assert.Zero(t, got.Exclusive[stage.Retransmit])
	assert.EqualValues(t, 101*ms, got.Plain[stage.Retransmit])
	assert.Equal(t, 2, got.Retransmits)
}

func TestALossThatShowsTooLateIsCounted(t *testing.T) {
	var l log
	a := New(Config{}, &l)
	answeredWhole(a, 200)
	feed(a, tick(2000), resent(2100, false, false), resent(2200, true, true))
	require.Len(t, l.finished, 1)
	assert.EqualValues(t, 1, a.Unparsed()["retransmitted_late"])
}

func TestStoppingDoesNotMakeAWholeResponseIncomplete(t *testing.T) {
	var l log
	a := New(Config{}, &l)
	answeredWhole(a, 200)
	a.Close()
	assert.Empty(t, only(t, l.finished).Incomplete)

	l = log{}
	a = New(Config{}, &l)
	answeredWhole(a, 200)
	feed(a, resent(221, false, false))
	a.Close()
	assert.Equal(t, []string{IncompleteStopped}, only(t, l.finished).Incomplete, "when the client had it is not known")
}

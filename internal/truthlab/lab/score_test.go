package lab

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/stage"
)

const ms = time.Millisecond

// account is what a hand-made receiver says of each request.
type account map[*Sample]*Seen

func (a account) of(x *Sample) *Seen { return a[x] }

// says adds a request that took latency, and the stages that are said of it; nil
// says nothing.
func (a account) says(latency time.Duration, stages map[string]float64) *Sample {
	x := &Sample{Start: time.Unix(0, 0), End: time.Unix(0, 0).Add(latency)}
	if stages != nil {
		a[x] = &Seen{Stages: stages, Duration: latency.Seconds()}
	}
	return x
}

// usual are n requests of 2 ms that nothing delayed.
func (a account) usual(n int) (list []*Sample) {
	for range n {
		stages := map[string]float64{}
		for _, s := range stage.All() {
			stages[s.String()] = 0
		}
		stages["cpu"] = 0.002
		list = append(list, a.says(2*ms, stages))
	}
	return list
}

func lockScenario() *Scenario {
	s := Scenario{
		Name: "test/lock", What: "a test", Stage: "lock", Server: Server{Name: "none", Start: func(context.Context, *Rig) error { return nil }},
		Affected: Ask{Path: "/lock"},
	}.withDefaults()
	return &s
}

func TestARequestIsRightIfItsExcessIsTheInjectedStage(t *testing.T) {
	for name, c := range map[string]struct {
		latency  time.Duration
		says     map[string]float64
		right    int
		named    string
		errP50   float64
		leftover float64
	}{
		"all of it in the stage":        {42 * ms, map[string]float64{"cpu": 0.002, "lock": 0.040}, 1, "lock", 0, 0},
		"within a millisecond":          {42 * ms, map[string]float64{"cpu": 0.002, "lock": 0.0391}, 1, "lock", 0, 0},
		"a fifth of it missing":         {42 * ms, map[string]float64{"cpu": 0.002, "lock": 0.032, "wait": 0.008}, 1, "lock", 0.2, 0.2},
		"more than there was":           {42 * ms, map[string]float64{"cpu": 0.002, "lock": 0.048}, 1, "lock", 0.2, 0},
		"in another stage":              {42 * ms, map[string]float64{"cpu": 0.002, "lock": 0, "page_fault": 0.040}, 0, "page_fault", 1, 0},
		"left in wait and unattributed": {42 * ms, map[string]float64{"cpu": 0.002, "lock": 0, "wait": 0.030, "unattributed": 0.010}, 0, "wait", 1, 1},
		"nothing stands out":            {42 * ms, map[string]float64{"cpu": 0.002, "lock": 0.004}, 0, noStage, 0.9, 0},
		"no span":                       {42 * ms, nil, 0, noSpan, 1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			a := account{}
			unaffected := a.usual(9)
			x := a.says(c.latency, c.says)
			r := score(lockScenario(), &outcome{affected: []*Sample{x}, unaffected: unaffected}, &outcome{unaffected: a.usual(9)}, a.of)
			assert.Equal(t, 1, r.Affected)
			assert.Equal(t, c.right, r.Right)
			assert.Equal(t, map[string]int{c.named: 1}, r.Named)
			assert.InDelta(t, c.errP50, r.LatencyErrorP50, 1e-9)
			assert.InDelta(t, c.errP50, r.LatencyErrorP95, 1e-9)
			assert.InDelta(t, c.leftover, r.UnattributedShare, 1e-9)
			assert.Equal(t, c.named == noSpan, r.Missing == 1, "%d", r.Missing)
			assert.Equal(t, c.right == 0 || c.errP50 > 0.25, len(r.Examples) == 1, "%v", r.Examples)
			assert.Equal(t, c.right == 1 && c.errP50 <= 0.1, !r.Failed(), "%+v", r.Missed())
			assert.Zero(t, r.FalseBlame)
		})
	}
}

func TestWhatIsUsualIsNoExcess(t *testing.T) {
	a := account{}
	var unaffected []*Sample
	for range 9 { // every request waits 30 ms for the lock
		unaffected = append(unaffected, a.says(32*ms, map[string]float64{"lock": 0.030, "cpu": 0.002}))
	}
	x := a.says(72*ms, map[string]float64{"lock": 0.030, "cpu": 0.042})
	r := score(lockScenario(), &outcome{affected: []*Sample{x}, unaffected: unaffected}, &outcome{}, a.of)
	assert.Equal(t, map[string]int{"cpu": 1}, r.Named)
	assert.Zero(t, r.FalseBlame)
}

func TestTheServersOwnClockIsTheTruthForAFaultByRequest(t *testing.T) {
	a := account{}
	s := lockScenario()
	unaffected := a.usual(3)
	for _, x := range unaffected {
		x.Fault = ms
	}
	// the client was slow by itself: that is none of the server's delay
	x := a.says(90*ms, map[string]float64{"cpu": 0.002, "lock": 0.040})
	x.Fault = 41 * ms
	r := score(s, &outcome{affected: []*Sample{x}, unaffected: unaffected}, &outcome{}, a.of)
	assert.InDelta(t, 0.040, r.Added, 1e-9)
	assert.Zero(t, r.LatencyErrorP50)
	// from outside there is only the client's clock
	s.Affected, s.Inject = Ask{}, func(context.Context, *Rig, time.Duration) error { return nil }
	r = score(s, &outcome{affected: []*Sample{x}, unaffected: unaffected}, &outcome{}, a.of)
	assert.InDelta(t, 0.088, r.Added, 1e-9)
	// and a scenario may know better
	s.Added = func(*Sample, time.Duration) time.Duration { return 10 * ms }
	r = score(s, &outcome{affected: []*Sample{x}, unaffected: unaffected}, &outcome{}, a.of)
	assert.InDelta(t, 0.010, r.Added, 1e-9)
}

func TestTheStageToBeNamedIsChosenAsTheProcessorDoes(t *testing.T) {
	for name, c := range map[string]struct {
		excess map[key]float64
		want   string
	}{
		"nothing":                       {nil, noStage},
		"too little":                    {map[key]float64{{"lock", false}: 0.0049}, noStage},
		"the largest of its rank":       {map[key]float64{{"lock", false}: 0.02, {"page_fault", false}: 0.03}, "page_fault"},
		"a stall before what is left":   {map[key]float64{{"lock", false}: 0.02, {"cpu", false}: 0.04}, "lock"},
		"unless it explains too little": {map[key]float64{{"lock", false}: 0.019, {"cpu", false}: 0.04}, "cpu"},
		"a stall before a socket total": {map[key]float64{{"lock", false}: 0.03, {"send_buffer", true}: 0.05}, "lock"},
		"a socket total before syscall": {map[key]float64{{"syscall", false}: 0.04, {"send_buffer", true}: 0.03}, "send_buffer"},
		"a syscall before wait":         {map[key]float64{{"syscall", false}: 0.03, {"wait", false}: 0.04}, "syscall"},
		"a stage that is new":           {map[key]float64{{"brand_new", false}: 0.03, {"wait", false}: 0.04}, "brand_new"},
		"equal ones by name":            {map[key]float64{{"page_fault", false}: 0.03, {"lock", false}: 0.03}, "lock"},
	} {
		assert.Equal(t, c.want, nameOf(c.excess), name)
	}
}

func TestFalseBlameIsWhatTheClientDidNotWaitForOrWasInjectedElsewhere(t *testing.T) {
	stalled := func(stage string, t float64) map[string]float64 {
		return map[string]float64{"cpu": 0.002, stage: t}
	}
	for name, c := range map[string]struct {
		latency      time.Duration
		says         map[string]float64
		control      bool
		falsely, own int
	}{
		"the client did not wait":           {2 * ms, stalled("run_queue", 0.030), false, 1, 0},
		"the client waited, for the host":   {32 * ms, stalled("run_queue", 0.030), false, 0, 1},
		"more than the client waited":       {17 * ms, stalled("run_queue", 0.030), false, 1, 0},
		"the stage that others suffer from": {32 * ms, stalled("lock", 0.030), false, 1, 0},
		"what no host does":                 {32 * ms, stalled("lock", 0.030), true, 1, 0},
		"computing is no blame":             {32 * ms, map[string]float64{"cpu": 0.032}, false, 0, 0},
		"waiting is no blame":               {32 * ms, stalled("wait", 0.030), false, 0, 0},
		"short stalls are not named":        {6 * ms, stalled("lock", 0.004), false, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			a := account{}
			s := lockScenario()
			s.Control = c.control
			unaffected := append(a.usual(9), a.says(c.latency, c.says))
			r := score(s, &outcome{unaffected: unaffected}, &outcome{unaffected: a.usual(10)}, a.of)
			assert.Equal(t, c.falsely, r.FalseBlame)
			assert.Equal(t, c.own, r.HostStalls)
			assert.Len(t, r.FalseNamed, c.falsely)
			if c.falsely > 0 {
				assert.Contains(t, cellNames(r.Missed()), cellFalse, "one in ten")
			}
			// from outside, the fault is over by then
			outside := *s
			outside.Affected, outside.Inject = Ask{}, func(context.Context, *Rig, time.Duration) error { return nil }
			assert.Equal(t, c.falsely, score(&outside, &outcome{unaffected: unaffected}, &outcome{unaffected: a.usual(10)}, a.of).FalseBlame)
			// as much happens without the fault: the host is to blame
			r = score(s, &outcome{unaffected: unaffected}, &outcome{unaffected: append(a.usual(9), a.says(c.latency, c.says))}, a.of)
			assert.Zero(t, r.FalseBlame)
			assert.NotContains(t, cellNames(r.Missed()), cellFalse)
		})
	}
}

func cellNames(cells []Cell) (names []string) {
	for _, c := range cells {
		names = append(names, c.What)
	}
	return names
}

func TestAControlIsNamedAsItIsAndNotAsAStall(t *testing.T) {
	s := lockScenario()
	s.Control, s.Stage = true, "wait"
	for named, c := range map[string]struct{ right, blamed int }{
		"cpu": {0, 0}, "wait": {1, 0}, "unattributed": {0, 0}, "lock": {0, 1}, "syscall": {0, 1}, "receive_queue": {0, 1},
	} {
		a := account{}
		x := a.says(42*ms, map[string]float64{"cpu": 0.002, named: 0.040})
		r := score(s, &outcome{affected: []*Sample{x}, unaffected: a.usual(5)}, &outcome{unaffected: a.usual(5)}, a.of)
		assert.Equal(t, c.right, r.Right, named)
		assert.Equal(t, c.blamed, r.Blamed, named)
		assert.Equal(t, c.right == 0, r.Failed(), named)
		assert.NotContains(t, cellNames(r.Cells()), cellP50, "a control attributes nothing")
	}
	// the host stalls as many without the control
	a := account{}
	x := a.says(42*ms, map[string]float64{"run_queue": 0.042})
	r := score(s, &outcome{affected: []*Sample{x}, unaffected: a.usual(5)}, &outcome{unaffected: append(a.usual(5), a.says(42*ms, map[string]float64{"run_queue": 0.042}), a.says(42*ms, map[string]float64{"run_queue": 0.042}))}, a.of)
	assert.Equal(t, 1, r.Blamed)
	assert.InDelta(t, 2.0/7, r.PairedBlamed, 1e-9)
}

func TestTheBarDependsOnTheClass(t *testing.T) {
	for _, c := range []struct {
		stage   string
		server  Server
		control bool
		class   Class
		bar     float64
	}{
		{"accept_queue", Server{Go: true}, false, ClassSocket, 0.98},
		{"send_buffer", Server{}, false, ClassSocket, 0.98},
		{"lock", Server{}, false, ClassThread, 0.95},
		{"lock", Server{Go: true}, false, ClassGo, 0.85},
		{"cpu", Server{Go: true}, true, ClassControl, 0.95},
	} {
		s := Scenario{Stage: c.stage, Server: c.server, Control: c.control}
		assert.Equal(t, c.class, s.Class())
		r := describe(&s)
		r.Affected, r.Right, r.Unaffected = 1000, 0, 1000
		cell := r.Cells()[0]
		assert.InDelta(t, c.bar, cell.Bar, 1e-9)
		assert.InDelta(t, c.bar, cell.Missed, 1e-9)
		r.Right = int(c.bar * 1000)
		assert.Empty(t, r.Missed(), "exactly the bar holds it")
		r.Right--
		assert.Len(t, r.Missed(), 1)
		assert.InDelta(t, 0.001, r.Missed()[0].Missed, 1e-9)
	}
}

func TestLostRecordsMissTheirBar(t *testing.T) {
	r := describe(lockScenario())
	r.Affected, r.Right, r.Unaffected, r.Lost = 10, 10, 10, 1
	assert.Equal(t, []string{cellLost}, cellNames(r.Missed()))
}

func TestWhatIsDeclaredInvisibleIsShownAndHeldToNoBar(t *testing.T) {
	s := lockScenario()
	s.Invisible = "nothing to see"
	a := account{}
	x := a.says(42*ms, map[string]float64{"cpu": 0.042})
	r := score(s, &outcome{affected: []*Sample{x}, unaffected: a.usual(5)}, &outcome{}, a.of)
	assert.Zero(t, r.Right)
	assert.Equal(t, map[string]int{"cpu": 1}, r.Named)
	assert.Empty(t, r.Cells())
	assert.False(t, r.Failed())
	r.Error = "but it must run"
	assert.True(t, r.Failed())
}

func TestQuantiles(t *testing.T) {
	assert.Zero(t, quantile(nil, 0.5))
	values := []float64{5, 1, 4, 2, 3}
	assert.InDelta(t, 3, quantile(values, 0.5), 0)
	assert.InDelta(t, 5, quantile(values, 0.95), 0)
	assert.InDelta(t, 1, quantile(values, 0), 0)
	assert.Equal(t, []float64{5, 1, 4, 2, 3}, values)
}

// between makes a request that is in flight from and to, in ms after the epoch.
func between(from, to int) *Sample {
	at := func(n int) time.Time { return time.Unix(0, 0).Add(time.Duration(n) * ms) }
	return &Sample{Start: at(from), End: at(to)}
}

func TestRequestsInFlightDuringAFaultFromOutsideAreAffected(t *testing.T) {
	s := Scenario{Inject: func(context.Context, *Rig, time.Duration) error { return nil }}
	w := []window{{time.Unix(0, 0).Add(100 * ms), time.Unix(0, 0).Add(140 * ms)}}
	for name, c := range map[string]struct {
		from, to int
		want     string
	}{
		"before":                {50, 100, "unaffected"},
		"all of it":             {90, 150, "affected"},
		"20 ms of it":           {120, 145, "affected"},
		"less":                  {121, 145, "beside"},
		"its begin":             {99, 101, "beside"},
		"short, within":         {110, 111, "beside"},
		"as queues are emptied": {150, 155, "beside"},
		"after that":            {160, 260, "unaffected"},
	} {
		x := between(c.from, c.to)
		o := classify([]*Sample{x}, w, &s)
		assert.Equal(t, []int{btoi(c.want == "affected"), btoi(c.want == "unaffected"), btoi(c.want == "beside")},
			[]int{len(o.affected), len(o.unaffected), len(o.beside)}, name)
		assert.Equal(t, []*Sample{x}, o.all())
	}
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

func TestOnAnEventLoopWhoIsInFlightBesideAnAffectedRequestIsOnNeitherSide(t *testing.T) {
	asked := between(100, 140)
	asked.Asked, asked.Prepared = true, time.Unix(0, 0).Add(90*ms)
	others := []*Sample{between(10, 20), between(80, 91), between(110, 145), between(139, 150), between(159, 162), between(161, 165)}
	samples := append([]*Sample{asked}, others...)
	o := classify(samples, nil, &Scenario{Server: Server{Serial: true}})
	assert.Equal(t, []*Sample{asked}, o.affected)
	assert.Equal(t, []*Sample{others[0], others[5]}, o.unaffected)
	assert.Equal(t, others[1:5], o.beside)
	o = classify(samples, nil, &Scenario{})
	assert.Equal(t, others, o.unaffected, "elsewhere it shall not be harmed, nor blamed")
}

func TestWhatTheHostDelayedAsWellIsSetAside(t *testing.T) {
	s := lockScenario()
	asked := func(fault, queued time.Duration) *Sample {
		return &Sample{Asked: true, Start: time.Unix(0, 0), End: time.Unix(0, 0).Add(100 * ms), Fault: fault, Queued: queued}
	}
	clean, half, short, little, silent := asked(40*ms, 19*ms), asked(40*ms, 20*ms), asked(2*ms, 5*ms), asked(2*ms, 4*ms), asked(0, 0)
	all := []*Sample{clean, half, short, little, silent}
	o := classify(all, nil, s)
	assert.Equal(t, []*Sample{clean, little, silent}, o.affected)
	assert.Equal(t, []*Sample{half, short}, o.disturbed)
	assert.ElementsMatch(t, all, o.all())
	assert.Equal(t, 2, score(s, o, &outcome{}, account{}.of).Disturbed)
	s.Stage = "run_queue"
	assert.Equal(t, all, classify(all, nil, s).affected, "here it is the fault itself")
}

func TestAScenarioThatCannotBeIsRefused(t *testing.T) {
	good := *lockScenario()
	good.Name, good.Affected = "a/b/c", Ask{Path: "/x"}
	require.NoError(t, good.Validate())
	for want, spoil := range map[string]func(*Scenario){
		"needs Name":             func(s *Scenario) { s.What = "" },
		"either Affected or":     func(s *Scenario) { s.Affected = Ask{} },
		"it is never called":     func(s *Scenario) { s.Affected, s.Before = Ask{}, func(context.Context, *Rig) error { return nil } },
		"shorter than 20ms":      func(s *Scenario) { s.Length = ms },
		"nothing is shared":      func(s *Scenario) { s.Shared = true },
		"a control is cpu, wait": func(s *Scenario) { s.Control = true },
	} {
		s := good
		spoil(&s)
		assert.ErrorContains(t, s.Validate(), want)
	}
}

// A receiver that says nothing, or the same of everything, and a fault that does not
// happen must not pass.
func TestABadReceiverOrAFaultThatDoesNotHappenDoesNotPass(t *testing.T) {
	repeat := func(n int, one func() *Sample) (list []*Sample) {
		for range n {
			list = append(list, one())
		}
		return list
	}
	silent := func(a account) func() *Sample { return func() *Sample { return a.says(2*ms, nil) } }
	saying := func(a account, latency time.Duration, stages map[string]float64) func() *Sample {
		return func() *Sample { return a.says(latency, stages) }
	}
	locked := map[string]float64{"cpu": 0.002, "lock": 0.040}
	for name, c := range map[string]struct {
		stage      string // of a control; "" is the lock scenario
		affected   func(a account) []*Sample
		unaffected func(a account) []*Sample
		missed     []string
		fails      string
	}{
		"a lock that is told": {
			affected: func(a account) []*Sample { return repeat(100, saying(a, 42*ms, locked)) },
		},
		"a control that is told": {
			stage:    "cpu",
			affected: func(a account) []*Sample { return repeat(100, saying(a, 42*ms, map[string]float64{"cpu": 0.042})) },
		},
		"a control, and nothing is said": {
			stage:      "cpu",
			affected:   func(a account) []*Sample { return repeat(100, saying(a, 42*ms, nil)) },
			unaffected: func(a account) []*Sample { return repeat(500, silent(a)) },
			missed:     []string{cellRight, cellUnseen},
		},
		"a control, and spans have no stages": {
			stage:      "cpu",
			affected:   func(a account) []*Sample { return repeat(100, saying(a, 42*ms, map[string]float64{})) },
			unaffected: func(a account) []*Sample { return repeat(500, saying(a, 2*ms, map[string]float64{})) },
			missed:     []string{cellRight},
		},
		"a control's computing is called unattributed": {
			stage: "cpu",
			affected: func(a account) []*Sample {
				return repeat(100, saying(a, 42*ms, map[string]float64{"cpu": 0.002, "unattributed": 0.040}))
			},
			missed: []string{cellRight},
		},
		"a control sleeps where it is to compute": {
			stage: "cpu",
			affected: func(a account) []*Sample {
				return repeat(100, saying(a, 42*ms, map[string]float64{"cpu": 0.002, "wait": 0.040}))
			},
			missed: []string{cellRight},
		},
		"a control with a third of it in a stall": {
			stage: "cpu",
			affected: func(a account) []*Sample {
				return repeat(100, saying(a, 42*ms, map[string]float64{"cpu": 0.029, "reclaim": 0.013}))
			},
			missed: []string{cellOver},
		},
		"a control's fault does not happen": {
			stage:    "cpu",
			affected: func(a account) []*Sample { return repeat(100, saying(a, 2*ms, map[string]float64{"cpu": 0.002})) },
			missed:   []string{cellRight},
			fails:    "the fault did not happen: it cost 0.0 ms",
		},
		"a lock's fault hardly happens": {
			affected: func(a account) []*Sample {
				return repeat(100, saying(a, 21*ms, map[string]float64{"cpu": 0.002, "lock": 0.019}))
			},
			fails: "the fault did not happen: it cost 19.0 ms",
		},
		"no unaffected request has a span": {
			affected:   func(a account) []*Sample { return repeat(100, saying(a, 42*ms, locked)) },
			unaffected: func(a account) []*Sample { return repeat(500, silent(a)) },
			missed:     []string{cellUnseen},
		},
		"affected spans are not whole": {
			affected: func(a account) []*Sample {
				list := repeat(100, saying(a, 42*ms, locked))
				for _, x := range list[:2] {
					a[x].Incomplete = []string{"lost_records"}
				}
				return list
			},
			missed: []string{cellUnseen},
		},
		"the wrong stage of unaffected requests that waited": {
			affected: func(a account) []*Sample { return repeat(100, saying(a, 42*ms, locked)) },
			unaffected: func(a account) []*Sample {
				return append(a.usual(500), repeat(100, saying(a, 22*ms, map[string]float64{"cpu": 0.002, "syscall": 0.020}))...)
			},
			missed: []string{cellFalse},
		},
		"a wait for a CPU that the scheduler knows nothing of": {
			affected: func(a account) []*Sample { return repeat(100, saying(a, 42*ms, locked)) },
			unaffected: func(a account) []*Sample {
				waited := repeat(100, saying(a, 22*ms, map[string]float64{"cpu": 0.002, "run_queue": 0.020}))
				for _, x := range waited {
					x.Account = true
				}
				return append(a.usual(500), waited...)
			},
			missed: []string{cellFalse},
		},
		"twice the time that unaffected requests waited": {
			affected: func(a account) []*Sample { return repeat(100, saying(a, 42*ms, locked)) },
			unaffected: func(a account) []*Sample {
				return append(a.usual(500), repeat(100, saying(a, 22*ms, map[string]float64{"cpu": 0.002, "qdisc": 0.038}))...)
			},
			missed: []string{cellFalse},
		},
		"a stall beside the right one that there was not": {
			affected: func(a account) []*Sample {
				return repeat(100, saying(a, 42*ms, map[string]float64{"cpu": 0.002, "lock": 0.040, "reclaim": 0.039}))
			},
			missed: []string{cellOver},
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := account{}
			s := lockScenario()
			if c.stage != "" {
				s.Control, s.Stage = true, c.stage
			}
			unaffected := a.usual(500)
			if c.unaffected != nil {
				unaffected = c.unaffected(a)
			}
			r := score(s, &outcome{affected: c.affected(a), unaffected: unaffected}, &outcome{unaffected: a.usual(500)}, a.of)
			assert.Equal(t, c.missed, cellNames(r.Missed()))
			if c.fails == "" {
				assert.Empty(t, r.Error)
			} else {
				assert.ErrorContains(t, errors.New(r.Error), c.fails)
			}
			assert.Equal(t, c.missed != nil || c.fails != "", r.Failed())
		})
	}
}

func TestTheHostsWaitForACPUIsConfirmedByTheScheduler(t *testing.T) {
	a := account{}
	waited := func() *Sample {
		return a.says(22*ms, map[string]float64{"cpu": 0.002, "run_queue": 0.020})
	}
	first, second := waited(), waited()
	first.Account, second.Account = true, true
	first.Queued, second.conn = 20*ms, 1
	for serial, wrong := range map[bool]int{
		true:  0, // told with the first of the answers that the thread owed
		false: 1, // the other has a thread of its own
	} {
		s := lockScenario()
		s.Server.Serial = serial
		r := score(s, &outcome{unaffected: append(a.usual(10), first, second)}, &outcome{unaffected: a.usual(10)}, a.of)
		assert.Equal(t, wrong, r.FalseBlame)
		assert.Equal(t, 2-wrong, r.HostStalls)
	}
	// what it waits for after it has said so is told with the next answer
	later := a.usual(1)[0]
	later.Start, later.End, later.Queued, later.conn = first.End, first.End.Add(2*ms), 20*ms, 1
	r := score(lockScenario(), &outcome{unaffected: append(a.usual(10), second, later)}, &outcome{unaffected: a.usual(10)}, a.of)
	assert.Zero(t, r.FalseBlame)
}

func TestOnAnEventLoopTheHostLeavesBytesLying(t *testing.T) {
	a := account{}
	lying := a.says(22*ms, map[string]float64{"cpu": 0.002, "receive_queue": 0.020})
	for serial, wrong := range map[bool]int{true: 0, false: 1} {
		s := lockScenario()
		s.Server.Serial = serial
		r := score(s, &outcome{unaffected: append(a.usual(10), lying)}, &outcome{unaffected: a.usual(10)}, a.of)
		assert.Equal(t, wrong, r.FalseBlame)
	}
}

func TestWhoWaitsWithAnAffectedRequestMustHaveItsStallAsASharedOne(t *testing.T) {
	s := lockScenario()
	s.Server.Serial, s.Shared = true, true
	asked := between(100, 140)
	asked.Asked = true
	with, short, late := between(90, 150), between(60, 119), between(96, 160)
	a := account{asked: {Stages: map[string]float64{"lock": 0.040, "cpu": 0}}}
	unaffected := a.usual(9)
	o := classify(append([]*Sample{asked, with, short, late}, unaffected...), nil, s)
	require.Equal(t, []sharing{{with, 40 * ms}}, o.sharing, "the others were read after it began, or waited less than 20 ms")

	whole := stretch{stage: "lock", took: 39 * ms, shared: true, sharedBy: 2, links: 1}
	for name, c := range map[string]struct {
		spoil func(*stretch)
		right int
	}{
		"the same stall":     {func(*stretch) {}, 1},
		"another stage":      {func(p *stretch) { p.stage = "syscall" }, 0},
		"half of it":         {func(p *stretch) { p.took = 20 * ms }, 0},
		"as its own":         {func(p *stretch) { p.shared = false }, 0},
		"without the other":  {func(p *stretch) { p.links = 0 }, 0},
		"shared by one only": {func(p *stretch) { p.sharedBy = 1 }, 0},
	} {
		part := whole
		c.spoil(&part)
		a[with] = &Seen{Stages: map[string]float64{}, parts: []stretch{part}}
		r := score(s, o, &outcome{}, a.of)
		assert.Equal(t, 1, r.SharedOf)
		assert.Equal(t, c.right, r.SharedRight, name)
		assert.Equal(t, c.right == 0, slices.Contains(cellNames(r.Missed()), cellShared), name)
	}
	assert.Zero(t, score(s, o, &outcome{}, account{}.of).SharedRight, "nothing is said of it")
}

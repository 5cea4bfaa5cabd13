package lab

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// Result is what came of a scenario, as it stands in the report. Shares and errors
// are fractions, times are seconds.
type Result struct {
	Name      string   `json:"name"`
	Server    string   `json:"server"`
	Stage     string   `json:"stage"`
	Also      []string `json:"also,omitempty"`     // stages that are as right
	Brings    []string `json:"brings,omitempty"`   // stages that are not, but count as told
	Evidence  string   `json:"evidence,omitempty"` // the attribute that must tell what was added
	Control   bool     `json:"control"`
	Class     Class    `json:"class"`
	What      string   `json:"what"`
	Report    string   `json:"report,omitempty"`
	Invisible string   `json:"invisible,omitempty"`
	Skipped   string   `json:"skipped,omitempty"` // why it could not be run here
	Error     string   `json:"error,omitempty"`   // why its figures are not whole

	Affected   int `json:"affected"`
	Right      int `json:"right"` // affected requests whose top stage is the right one
	FalseBlame int `json:"false_blame"`
	Unaffected int `json:"unaffected"`

	// LatencyError is how far the time that the receiver attributes to the stage
	// is from what the fault added, over that: 0 within a millisecond.
	LatencyErrorP50 float64 `json:"latency_error_p50"`
	LatencyErrorP95 float64 `json:"latency_error_p95"`
	// UnattributedShare is the part of the added time that the receiver leaves in
	// wait and unattributed, the median over the affected requests.
	UnattributedShare float64 `json:"unattributed_share"`
	// Over is what all stalls together claim beyond the added time, over that (of a
	// control: all that they claim), the median; 0 within a millisecond.
	Over float64 `json:"over_attributed"`

	Blamed       int            `json:"blamed"`        // affected requests of a control whose top stage is a stall
	PairedBlamed float64        `json:"paired_blamed"` // the share of the run without the fault whose top stage is a stall
	Named        map[string]int `json:"named"`         // affected requests by the stage named; "none" without one, "missing" without a span
	Added        float64        `json:"added_p50"`
	Attributed   float64        `json:"attributed_p50"`
	SharedRight  int            `json:"shared_right,omitempty"` // requests beside an affected one that have its stall as a shared one
	SharedOf     int            `json:"shared,omitempty"`       // of so many
	HostStalls   int            `json:"host_stalls"`            // unaffected requests with a stall that is the host's own, see hostOwn
	FalseNamed   map[string]int `json:"false_named,omitempty"`
	Beside       int            `json:"beside"`             // requests that the fault touched too little to count
	Disturbed    int            `json:"disturbed"`          // affected requests that the host delayed at least half as long besides, set aside
	Paired       int            `json:"paired"`             // requests of the run without the fault
	Examples     []string       `json:"examples,omitempty"` // a few requests of which the wrong thing was said
	Missing      int            `json:"missing"`            // requests that the receiver did not speak of
	Incomplete   int            `json:"incomplete"`         // requests whose record is said not to be whole
	Unseen       int            `json:"unseen"`             // unaffected requests without a span, or with one that is not whole
	Partial      int            `json:"partial"`            // affected requests with a span that is not whole
	Lost         int64          `json:"lost_records"`
	Seconds      float64        `json:"seconds"`
	Time         time.Time      `json:"time"` // when it was had
	Machine      string         `json:"machine"`
}

// describe is a result with nothing but the scenario in it.
func describe(s *Scenario) *Result {
	return &Result{
		Name: s.Name, Server: s.Server.Name, Stage: s.Stage, Also: s.Also, Brings: s.Brings, Evidence: s.Evidence, Control: s.Control, Class: s.Class(), What: s.What,
		Report: s.Report, Invisible: s.Invisible, Named: map[string]int{},
	}
}

// Nothing is the stage of a delay of which the server's host knows nothing.
const Nothing = noStage

// noStage and noSpan stand for a stage where none was named.
const (
	noStage = "none"    // nothing stands out
	noSpan  = "missing" // the receiver did not speak of the request
)

// minExcess is what must stand out of a stage for it to be named, in seconds: the
// processor's default min_excess.
const minExcess = 0.005

// floor is the error of a latency that does not count, in seconds.
const floor = 0.001

// key is a value of a request that may stand out.
type key struct {
	stage  string
	socket bool // the plain total of a socket stage
}

// The ranks of values, as the processor has them: of two that explain a comparable
// part of a delay, the one of lower rank says more about its cause.
func (k key) rank() int {
	s, _ := stage.Parse(k.stage)
	switch {
	case k.socket:
		return 1
	case s == stage.Syscall:
		return 2
	case !isStall(k.stage):
		return 3
	}
	return 0
}

const ranks = 4

// isStall tells whether naming the stage blames the kernel. A stage that is not
// known here is one.
func isStall(name string) bool {
	switch name {
	case "cpu", "wait", "unattributed", noStage, noSpan:
		return false
	}
	return true
}

// isStage tells a stage from what stands for none.
func isStage(name string) bool { return name != noStage && name != noSpan }

// values are what is compared of a request, in seconds.
func (s *Seen) values() map[key]float64 {
	v := make(map[key]float64, len(s.Stages)+len(s.Sockets))
	for name, t := range s.Stages {
		v[key{name, false}] = t
	}
	for name, t := range s.Sockets {
		v[key{name, true}] = t
	}
	return v
}

// baseline is what is usual among the unaffected requests of a run.
type baseline struct {
	median   map[key]float64
	evidence float64 // of Scenario.Evidence
	latency  time.Duration
	fault    time.Duration
}

// usualEvidence is the median of an attribute, in seconds, over the requests that have it.
func usualEvidence(name string, samples []*Sample, seen func(*Sample) *Seen) float64 {
	var all []float64
	for _, x := range samples {
		if about := seen(x); about != nil {
			if v, ok := about.Evidence[name]; ok {
				all = append(all, v)
			}
		}
	}
	return quantile(all, 0.5)
}

func baselineOf(samples []*Sample, seen func(*Sample) *Seen) baseline {
	all := map[key][]float64{}
	var latency, fault []float64
	for _, x := range samples {
		latency = append(latency, x.Latency().Seconds())
		fault = append(fault, x.Fault.Seconds())
		if s := seen(x); s != nil {
			for k, v := range s.values() {
				all[k] = append(all[k], v)
			}
		}
	}
	b := baseline{median: map[key]float64{}, latency: duration(quantile(latency, 0.5)), fault: duration(quantile(fault, 0.5))}
	for k, v := range all {
		b.median[k] = quantile(v, 0.5)
	}
	return b
}

// excess is what a request has above the medians.
func (b *baseline) excess(s *Seen) map[key]float64 {
	e := s.values()
	for k := range e {
		e[k] -= b.median[k]
	}
	return e
}

// nameOf chooses the stage to be named: of the best rank whose largest excess is at
// least half of the largest of all.
func nameOf(excess map[key]float64) string {
	const comparableShare = 0.5
	var best [ranks]float64
	var named [ranks]string
	most := 0.0
	for k, v := range excess {
		if v < minExcess {
			continue
		}
		r := k.rank()
		// equal ones by name, so that the outcome does not depend on the map's order
		if v > best[r] || v == best[r] && k.stage < named[r] {
			best[r], named[r] = v, k.stage
		}
		most = max(most, v)
	}
	for r := range ranks {
		if named[r] != "" && best[r] >= comparableShare*most {
			return named[r]
		}
	}
	return noStage
}

// score compares what the receiver says with what was done.
func score(s *Scenario, faulty, paired *outcome, seen func(*Sample) *Seen) *Result {
	r := describe(s)
	r.Affected, r.Unaffected, r.Beside = len(faulty.affected), len(faulty.unaffected), len(faulty.beside)
	r.Disturbed = len(faulty.disturbed)
	r.Paired = len(paired.unaffected) + len(paired.beside)
	for _, x := range append(faulty.all(), paired.all()...) {
		switch about := seen(x); {
		case about == nil:
			r.Missing++
		case len(about.Incomplete) > 0:
			r.Incomplete++
		}
	}
	usual := baselineOf(faulty.unaffected, seen)
	usual.evidence = usualEvidence(s.Evidence, faulty.unaffected, seen)
	for _, x := range faulty.unaffected {
		if about := seen(x); about == nil || len(about.Incomplete) > 0 {
			r.Unseen++
		}
	}

	var errs, left, added, attributed, over, waited []float64
	for _, x := range faulty.affected {
		truth := addedTo(s, x, &usual).Seconds()
		about := seen(x)
		named, claimed := noSpan, 0.0
		if about != nil {
			excess := usual.excess(about)
			named = nameOf(excess)
			claimed = excess[key{s.Stage, false}]
			for _, more := range slices.Concat(s.Also, s.Brings) {
				claimed += excess[key{more, false}]
			}
			if s.Evidence != "" {
				claimed = about.Evidence[s.Evidence] - usual.evidence
			}
			if truth > 0 {
				rest := excess[key{"wait", false}] + excess[key{"unattributed", false}]
				left = append(left, max(0, rest)/truth)
				whole := truth
				if s.Added != nil { // it may leave out what the fault is not to be blamed for
					whole = max(whole, (x.Latency() - usual.latency).Seconds())
				}
				over = append(over, beyondTruth(excess, whole, x.Queued.Seconds(), s.Control))
			}
			if len(about.Incomplete) > 0 {
				r.Partial++
			}
		}
		waited = append(waited, (x.Latency() - usual.latency).Seconds())
		r.Named[named]++
		off := relative(claimed, truth)
		if s.right(named) {
			r.Right++
		}
		if !s.right(named) || (!s.Control || s.Evidence != "") && off > barErrorP95 {
			r.example("affected", x, &usual, about)
		}
		if s.Control && isStall(named) {
			r.Blamed++
		}
		errs = append(errs, off)
		added, attributed = append(added, truth), append(attributed, claimed)
	}
	r.LatencyErrorP50, r.LatencyErrorP95 = quantile(errs, 0.5), quantile(errs, 0.95)
	r.UnattributedShare = quantile(left, 0.5)
	r.Added, r.Attributed = quantile(added, 0.5), quantile(attributed, 0.5)
	r.Over = quantile(over, 0.5)
	r.happened(max(r.Added, quantile(waited, 0.5)))

	r.blame(s, faulty, paired, seen)
	r.SharedOf = len(faulty.sharing)
	for _, x := range faulty.sharing {
		if about := seen(x.with); about != nil && about.shares(s.Stage, x.waited) {
			r.SharedRight++
		} else {
			r.example(fmt.Sprintf("for %.1f ms beside an affected one", 1e3*x.waited.Seconds()), x.with, &usual, about)
		}
	}
	return r
}

// shares tells whether a shared stall is said of a request, with whom it is shared, that
// lasted, in one piece or several, as long as it waited with another, within the error of
// a latency.
func (s *Seen) shares(stage string, waited time.Duration) bool {
	var took time.Duration
	for _, p := range s.parts {
		if p.stage == stage && p.shared && p.sharedBy >= 2 && p.links >= 1 {
			took += p.took
		}
	}
	return took > 0 && relative(took.Seconds(), waited.Seconds()) <= barErrorP95
}

// happened says so if the fault did not: if it cost, at the median and by the server's
// account or the client's clock, less than what is a fault, in seconds.
func (r *Result) happened(cost float64) {
	if r.Affected > 0 && cost < MinAffected.Seconds() {
		r.Error = fmt.Sprintf("the fault did not happen: it cost %.1f ms at the median, and a fault is at least %v; make it larger", 1e3*cost, MinAffected)
	}
}

// beyondTruth is what the stalls among the excesses claim together beyond what there
// was, over that. In a control there was nothing to claim. Nothing of queued is beyond
// it, the time for which the host kept the server from a CPU by the server's account.
func beyondTruth(excess map[key]float64, truth, queued float64, control bool) float64 {
	claimed := -queued
	for k, v := range excess {
		if !k.socket && isStall(k.stage) {
			claimed += max(0, v)
		}
	}
	if !control {
		claimed -= truth
	}
	if claimed <= floor {
		return 0
	}
	return claimed / truth
}

// addedTo is how much longer a request took because of the fault.
func addedTo(s *Scenario, x *Sample, usual *baseline) time.Duration {
	switch {
	case s.Added != nil:
		return s.Added(x, usual.latency)
	case s.Inject == nil && x.Fault > 0:
		return x.Fault - usual.fault
	}
	return x.Latency() - usual.latency
}

// relative is the error of a claimed time over the true one.
func relative(claimed, truth float64) float64 {
	wrong := math.Abs(claimed - truth)
	if wrong <= floor {
		return 0
	}
	return wrong / max(truth, floor)
}

// blame counts what is said of requests that the fault did not touch. A stall of
// such a request is a false blame unless it is the host's own. What happens in the run
// without the fault as well is not counted.
func (r *Result) blame(s *Scenario, faulty, paired *outcome, seen func(*Sample) *Seen) {
	count := func(o *outcome, remember bool) (wrong, host, stalls int, by map[string]int) {
		usual := baselineOf(o.unaffected, seen)
		by = map[string]int{}
		var all []*Sample // made when it is needed
		for _, x := range o.unaffected {
			about := seen(x)
			if about == nil {
				continue
			}
			excess := usual.excess(about)
			named := nameOf(excess)
			if !isStall(named) {
				continue
			}
			stalls++
			if all == nil {
				all = o.all()
			}
			claimed := max(excess[key{named, false}], excess[key{named, true}])
			if hostOwn(s, x, named, claimed, &usual, all) {
				host++
				continue
			}
			wrong++
			by[named]++
			if remember {
				r.example("unaffected", x, &usual, about)
			}
		}
		return wrong, host, stalls, by
	}
	wrong, host, _, by := count(faulty, true)
	pairedWrong, _, pairedStalls, _ := count(paired, false)
	r.HostStalls = host
	if n := len(paired.unaffected); n > 0 {
		r.PairedBlamed = share(pairedStalls, n)
		wrong -= pairedWrong * len(faulty.unaffected) / n
	}
	if r.FalseBlame = max(0, wrong); r.FalseBlame > 0 {
		r.FalseNamed = by
	}
}

// hostStages are what a shared host does to a request of a server that is left alone.
var hostStages = []stage.Stage{
	stage.RunQueue, stage.PageFault, stage.Reclaim, stage.Compaction, stage.PageCache, stage.BlockIO,
}

// hostOwn tells whether a stall that is claimed of an unaffected request, in seconds, is
// the host's own: it is one that the host can cause and none that the scenario injects
// into others, and it is confirmed. A wait for a CPU is confirmed by the scheduler's
// statistics, where the server tells them; another stall, by the client's clock. Where
// several requests share a thread, one that the host keeps from a CPU leaves the
// others' connections and bytes lying.
func hostOwn(s *Scenario, x *Sample, named string, claimed float64, usual *baseline, all []*Sample) bool {
	if s.right(named) {
		return false
	}
	known, _ := stage.Parse(named)
	lying := (s.Server.Serial || s.Server.Go) && (known == stage.AcceptQueue || known == stage.ReceiveQueue)
	if !lying && !slices.Contains(hostStages, known) {
		return false
	}
	confirmed := (x.Latency() - usual.latency).Seconds()
	// an accepting thread's wait is not in the account of the one that answers
	if x.Account && known == stage.RunQueue && !s.Normal.NewConn {
		confirmed = queued(s, x, all).Seconds()
	}
	return claimed <= confirmed*(1+barErrorP95)+floor
}

// queued is how long the thread that served a request was kept from a CPU meanwhile. It
// says so before it sends an answer: what it waits for after that is told with its next.
// A thread that serves all requests tells it with the first of the answers that it delayed.
func queued(s *Scenario, x *Sample, all []*Sample) time.Duration {
	sum := x.Queued
	var next *Sample
	for _, other := range all {
		switch {
		case other == x || !s.Server.Serial && other.conn != x.conn:
		case !other.Start.Before(x.End):
			if next == nil || other.Start.Before(next.Start) {
				next = other
			}
		case other.End.After(x.Start):
			sum += other.Queued
		}
	}
	if next != nil {
		sum += next.Queued
	}
	return sum
}

// example keeps what was said of a request where that is wrong, or far off.
func (r *Result) example(which string, x *Sample, usual *baseline, about *Seen) {
	const enough = 6
	if len(r.Examples) >= enough {
		return
	}
	text := fmt.Sprintf("%s, %.1f ms later than usual, %s", which, 1e3*(x.Latency()-usual.latency).Seconds(), x.where)
	if about == nil {
		r.Examples = append(r.Examples, text+": no span")
		return
	}
	text += fmt.Sprintf(", took %.1f ms by the kernel", 1e3*about.Duration)
	if len(about.Incomplete) > 0 {
		text += fmt.Sprintf(" (incomplete: %s)", strings.Join(about.Incomplete, ", "))
	}
	excess := usual.excess(about)
	keys := slices.SortedFunc(maps.Keys(excess), func(a, b key) int {
		return cmp.Or(cmp.Compare(excess[b], excess[a]), cmp.Compare(a.stage, b.stage))
	})
	for _, k := range keys {
		if excess[k] < floor {
			break
		}
		socket := ""
		if k.socket {
			socket = "socket "
		}
		text += fmt.Sprintf("; %s%s %.1f ms", socket, k.stage, 1e3*excess[k])
		if w := about.Wakers[k.stage]; w >= floor && !k.socket {
			text += fmt.Sprintf(" (%.1f ms by others)", 1e3*w)
		}
	}
	for name, v := range about.Evidence {
		text += fmt.Sprintf("; %s %.1f ms", name, 1e3*v)
	}
	for i, p := range about.parts {
		if i == 5 {
			text += fmt.Sprintf(" and %d more", len(about.parts)-i)
			break
		}
		text += fmt.Sprintf(" [%s %+.1f to %+.1f]", p.stage, 1e3*p.began.Sub(about.began).Seconds(), 1e3*p.began.Add(p.took).Sub(about.began).Seconds())
	}
	r.Examples = append(r.Examples, text)
}

// Recall is the share of affected requests whose top stage is right, 0 to 1.
func (r *Result) Recall() float64 { return share(r.Right, r.Affected) }

func share(n, of int) float64 {
	if of == 0 {
		return 0
	}
	return float64(n) / float64(of)
}

// quantile is the nearest-rank quantile, 0 of nothing.
func quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.SortedFunc(slices.Values(values), cmp.Compare)
	return sorted[min(len(sorted)-1, max(0, int(math.Ceil(q*float64(len(sorted))))-1))]
}

func duration(seconds float64) time.Duration { return time.Duration(seconds * float64(time.Second)) }

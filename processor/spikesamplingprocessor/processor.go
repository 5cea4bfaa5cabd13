package spikesamplingprocessor

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/consumer"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/processor"
	"go.uber.org/zap"

	"github.com/ebpfllm/ebpfllm/internal/baseline"
	"github.com/ebpfllm/ebpfllm/processor/spikesamplingprocessor/internal/metadata"
)

// tickInterval is how often due traces are looked for.
const tickInterval = 100 * time.Millisecond

// giantShare: a trace that takes more than this part of the buffer is decided
// at once, so that it does not push out all others.
const giantShare = 4

var (
	errBufferFull = errors.New("spike_sampling: the buffer is full of kept traces that the next component has not taken; the batch is refused, send it again later")
	errNotRunning = errors.New("spike_sampling: not running: it was not started yet, or is shut down")
)

// spikeSampling is the processor. One lock guards its state, but for what a
// clustering step works on (see clusters). Spans are marshalled before it is
// taken; steps run, and kept traces are put together and sent, after it is given
// back. One goroutine, run, steps and takes the decisions that time brings,
// another, deliver, sends, so none of these, nor a slow next component, keeps
// ConsumeTraces waiting.
type spikeSampling struct {
	id        component.ID
	cfg       *Config
	next      consumer.Traces
	logger    *zap.Logger
	telemetry *metadata.TelemetryBuilder
	policies  []policy
	limit     int              // bytes
	now       func() time.Time // the wall clock
	ticks     <-chan time.Time // test hook: replaces the ticker
	early     chan struct{}    // asks to hand on before the next tick
	ctx       context.Context  // of the processor's own work; ends at Shutdown's deadline
	cancel    context.CancelFunc
	stop      chan struct{}
	done      chan struct{}
	digests   sync.Pool
	memory    *memory // nil without a storage extension

	// elapsed returns how long after the beginning a time that now returned was,
	// by the monotonic clock.
	elapsed func(time.Time) time.Duration

	mu          sync.Mutex
	started     bool
	stopped     bool
	buffer      buffer
	operations  *operations
	baseline    *baseline.Book
	tails       *baseline.Tails
	reports     []baseline.TailReport // as of the last window
	clusters    *clusters
	sampled     *cache[decision]
	dropped     *cache[bool] // whether for good, by a drop policy
	outbox      []*keptTrace // decided, and not handed on yet
	waiting     int          // bytes of these
	outboxBytes int          // of these and those in delivery
	delivery    delivery
	nextStep    int64 // by clock
	began       int64 // ns since the epoch, by the wall clock
	lastTick    int64 // what clock returned last
	ahead       int64 // ns: by how much the wall clock was ahead of clock then
	finished    bool  // all is decided, nothing more comes in
	open        int   // clusters at the last step
	count       counts
	lastError   time.Time // when the log last told of an error downstream
	// when it last told of a condition that could not be evaluated
	lastConditionError time.Time
	storageLog         sync.Mutex // of the next one
	lastStorageError   time.Time
}

func newProcessor(set processor.Settings, cfg *Config, next consumer.Traces) (*spikeSampling, error) {
	policies, err := newPolicies(cfg.Policies, set.TelemetrySettings)
	if err != nil {
		return nil, err
	}
	telemetry, err := metadata.NewTelemetryBuilder(set.TelemetrySettings)
	if err != nil {
		return nil, fmt.Errorf("spike_sampling: setting up its metrics: %w", err)
	}
	p := &spikeSampling{
		id: set.ID, cfg: cfg, next: next, logger: set.Logger, telemetry: telemetry, policies: policies,
		limit: cfg.MaxBufferMiB << 20,
		now:   time.Now,
		early: make(chan struct{}, 1),
		stop:  make(chan struct{}), done: make(chan struct{}),
		digests:    sync.Pool{New: func() any { return newDigest(conditionsOf(policies), cfg.MaxAttributeBytes) }},
		buffer:     newBuffer(),
		operations: newOperations(cfg.Baseline.MaxSeries),
		sampled:    newCache[decision](cfg.DecisionCache.SampledCacheSize),
		dropped:    newCache[bool](cfg.DecisionCache.NonSampledCacheSize),
		count:      newCounts(),
	}
	if err := p.observeTails(); err != nil {
		telemetry.Shutdown()
		return nil, fmt.Errorf("spike_sampling: setting up its metrics: %w", err)
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	return p, nil
}

// Capabilities implements processor.Traces: spans are moved out of the data.
func (*spikeSampling) Capabilities() consumer.Capabilities {
	return consumer.Capabilities{MutatesData: true}
}

// Start implements component.Component.
func (p *spikeSampling) Start(ctx context.Context, host component.Host) error {
	memory, err := openMemory(ctx, host, p.cfg.Storage, p.id)
	if err != nil {
		return err
	}
	p.memory = memory
	p.mu.Lock()
	defer p.mu.Unlock()
	p.begin(ctx)
	p.started = true
	p.telemetry.ProcessorSpikeSamplingBufferLimit.Record(p.ctx, int64(p.limit))
	go p.run()
	return nil
}

// begin sets up what depends on the time.
func (p *spikeSampling) begin(ctx context.Context) {
	start := p.now()
	if p.elapsed == nil {
		p.elapsed = func(t time.Time) time.Duration { return t.Sub(start) } // both have a reading of that clock
	}
	b := p.cfg.Baseline
	cfg := baseline.Config{
		Quantile: b.Quantile, Factor: b.Factor, Window: b.Window, MinSamples: b.MinSamples,
		MinExcess: b.MinExcess.Seconds(), FallbackThreshold: b.FallbackThreshold.Seconds(), MaxSeries: b.MaxSeries,
	}
	p.baseline = baseline.New(cfg, start)
	p.tails = baseline.NewTails(cfg, start)
	p.restore(ctx, start)
	p.delivery.begin(&p.mu)
	p.clusters = newClusters(p.cfg.Clustering, start.UnixNano())
	p.began = start.UnixNano()
	p.lastTick = p.began
	p.nextStep = p.lastTick + p.cfg.Clustering.Stride.Nanoseconds()
}

func (p *spikeSampling) run() {
	defer close(p.done)
	go p.deliver()
	defer p.endDelivery()
	ticks := p.ticks
	if ticks == nil {
		t := time.NewTicker(tickInterval)
		defer t.Stop()
		ticks = t.C
	}
	for {
		select {
		case <-ticks:
			p.tick()
		case <-p.early:
			p.handOn()
		case <-p.stop:
			p.finish()
			return
		}
	}
}

// Shutdown implements component.Component: every trace still gets its decision,
// and what is kept is sent, until ctx ends.
func (p *spikeSampling) Shutdown(ctx context.Context) error {
	p.mu.Lock()
	started, stopped := p.started, p.stopped
	p.stopped = true
	p.mu.Unlock()
	if stopped {
		return nil
	}
	defer p.telemetry.Shutdown()
	defer p.cancel()
	if !started {
		return nil
	}
	close(p.stop)
	var err error
	select {
	case <-p.done:
	case <-ctx.Done():
		p.cancel() // the next component's call ends; the rest is left to the next process, or counted as lost
		<-p.done
		what := "were lost at shutdown"
		if p.memory != nil {
			what = "were not sent before the end of the shutdown; those in the storage are sent at the next start"
		}
		err = fmt.Errorf("spike_sampling: kept traces %s: %w", what, ctx.Err())
	}
	return errors.Join(err, p.memory.close(context.WithoutCancel(ctx)))
}

// ConsumeTraces implements consumer.Traces. It returns an error, and takes
// nothing, only when the buffer is full of kept traces that cannot be sent.
func (p *spikeSampling) ConsumeTraces(_ context.Context, td ptrace.Traces) error {
	spans := td.SpanCount()
	p.mu.Lock()
	switch {
	case p.stopped || !p.started:
		p.mu.Unlock()
		return errNotRunning
	case p.buffer.bytes >= p.limit: // undecided ones alone never fill it: see makeRoom
		p.count.drop(dropRefused, spans)
		p.mu.Unlock()
		return errBufferFull
	}
	p.mu.Unlock()

	d := p.digests.Get().(*digest)
	d.take(td)
	p.mu.Lock()
	err := p.absorb(d)
	p.mu.Unlock()
	d.reset()
	p.digests.Put(d)
	return err
}

// clock returns the time by which the processor waits, in nanoseconds: that of the
// wall clock at the beginning and what has passed since by the monotonic one. So
// it never goes back, and never jumps when the wall clock is set. The times of
// spans are by the wall clock: onClock and onWall convert.
func (p *spikeSampling) clock() int64 {
	t := p.now()
	p.lastTick = max(p.lastTick, p.began+p.elapsed(t).Nanoseconds())
	p.ahead = t.UnixNano() - p.lastTick
	return p.lastTick
}

// onClock converts a span's time, by the wall clock as it goes now, to one by
// clock. Both are in nanoseconds since the epoch.
func (p *spikeSampling) onClock(wall int64) int64 { return wall - p.ahead }

// onWall converts a time by clock to one by the wall clock as it goes now.
func (p *spikeSampling) onWall(at int64) int64 { return at + p.ahead }

// absorb puts a digested batch into the buffer.
func (p *spikeSampling) absorb(d *digest) error {
	if p.finished {
		p.count.drop(dropRefused, len(d.items))
		return errNotRunning
	}
	now := p.clock()
	p.count.drop(dropNoTraceID, d.missingTrace)
	p.count.drop(dropNoSpanID, d.missingSpan)
	p.count.truncated += int64(d.cutter.cuts)
	scopes := make([]*scope, len(d.envs))
	for i := range d.envs {
		scopes[i] = p.buffer.intern(&d.envs[i])
	}
	var late lateSpans
	for i := range d.items {
		it := &d.items[i]
		it.scope = scopes[it.env]
		if it.kernel != nil {
			p.operations.measure(it.scope.resource.service, now)
		}
		if p.follow(it, &late) {
			continue
		}
		tr := p.buffer.get(it.trace, now, now+p.cfg.DecisionWait.Nanoseconds())
		if !p.buffer.add(tr, it.record) {
			p.count.drop(dropDuplicate, 1)
			continue
		}
		tr.reopened = tr.reopened || it.reopen
		it.in = tr
		p.note(tr, it, now)
	}
	for _, k := range late.traces {
		p.enqueue(k)
	}
	for i := range d.items {
		if it := &d.items[i]; it.in != nil {
			p.observe(it.in, it, now)
		}
	}
	for i := range d.items {
		if tr := d.items[i].in; tr != nil && tr.bytes > p.limit/giantShare && p.buffer.traces[tr.id] == tr {
			p.decide(tr, earlyTooLarge, now)
		}
	}
	for _, s := range scopes {
		p.buffer.release(s) // those that no span was kept of
	}
	p.makeRoom(now)
	return nil
}

// outboxShare is which share of the buffer, one in so many, is for kept traces
// on their way out alone.
const outboxShare = 16

// makeRoom decides the oldest traces early, those that the buffer has too much.
// Those that are kept leave it only when they are sent: so it gives up after
// some, or all would be decided for the sake of one; if they cannot be sent, the
// buffer is full and nothing is taken in.
func (p *spikeSampling) makeRoom(now int64) {
	room := p.limit / outboxShare
	excess := func() int { return p.buffer.bytes - (p.limit - room + min(p.outboxBytes, room)) }
	for most := 4 * excess(); most > 0 && excess() > 0 && p.buffer.first != nil; {
		most -= p.buffer.first.bytes
		p.decide(p.buffer.first, earlyBufferFull, now)
	}
	if p.waiting > room/2 { // a busy buffer has no room for what a tick brings
		select {
		case p.early <- struct{}{}:
		default: // asked already
		}
	}
}

// note updates what the trace knows of itself by a span that was added.
func (p *spikeSampling) note(tr *trace, it *item, now int64) {
	tr.last = now
	tr.statuses |= statusBit(it.status)
	tr.matched |= it.match
	if tr.rv == 0 {
		tr.rv = it.rv
	}
	if it.th != 0 && (tr.th == 0 || it.th < tr.th) {
		tr.th = it.th
	}
	if it.role&roleOccurrence != 0 && it.end >= it.start {
		p.buffer.noteStall(tr, stall{it.parent, it.stage, it.end, it.end - it.start})
	}
	if it.role&roleRoot != 0 {
		tr.rootAt = now
		tr.foreignRoot = tr.foreignRoot || it.role&roleOwnRoot == 0
		due := now + tr.rootWait(p.cfg.DecisionWaitAfterRootReceived.Nanoseconds())
		if due < tr.due {
			p.buffer.setDue(tr, due)
		}
	}
}

// lateSpans are the spans of a batch that came after their trace was kept.
type lateSpans struct {
	traces []*keptTrace
	of     map[pcommon.TraceID]*keptTrace
}

// follow tells whether the span's trace was decided, and treats it likewise.
// The kernel's spans do not follow the decision to drop: they open the trace
// again, for what slowed the request down may be known only now.
func (p *spikeSampling) follow(it *item, late *lateSpans) bool {
	d, keep := p.sampled.get(it.trace)
	if !keep {
		final, drop := p.dropped.get(it.trace)
		if !drop {
			return false
		}
		if !final && it.role&(roleKernel|roleOccurrence) != 0 {
			it.reopen = true
			return false
		}
	}
	p.count.late(keep, 1)
	if !keep && !p.cfg.DryRun {
		return true
	}
	k := late.of[it.trace]
	if k == nil {
		k = &keptTrace{id: it.trace, decision: d, late: true}
		if late.of == nil {
			late.of = map[pcommon.TraceID]*keptTrace{}
		}
		late.of[it.trace] = k
		late.traces = append(late.traces, k)
	}
	k.records = append(k.records, it.record)
	it.scope.refs++
	n := allocated(int(it.size)) + lateOverhead
	k.bytes += n
	p.buffer.bytes += n
	return true
}

// enqueue puts a kept trace, whose bytes are charged to the buffer, where the
// next tick hands it on from, or makeRoom before it.
func (p *spikeSampling) enqueue(k *keptTrace) {
	p.outbox = append(p.outbox, k)
	p.waiting += k.bytes
	p.outboxBytes += k.bytes
}

// tick does what time brings: clustering steps, decisions, sending.
func (p *spikeSampling) tick() {
	p.mu.Lock()
	now := p.clock()
	stepped := now >= p.nextStep
	p.mu.Unlock()
	begin := time.Now()
	if stepped {
		p.step(now)
	}
	p.decideDue(func() bool { return len(p.buffer.due) > 0 && p.buffer.due[0].due <= now }, func() {
		p.check(p.buffer.due[0], now, stepped)
	})
	if stepped {
		p.telemetry.ProcessorSpikeSamplingStepDuration.Record(p.ctx, time.Since(begin).Seconds())
		p.mu.Lock()
		p.report()
		p.mu.Unlock()
	}
	p.handOn()
	p.save(time.Unix(0, now), false)
}

// decisionsAtOnce is the number of decisions after which spans that wait to be
// taken in get their turn: it keeps them waiting for a millisecond at most.
const decisionsAtOnce = 256

// decideDue decides while there is something due, under the lock but for pauses.
func (p *spikeSampling) decideDue(due func() bool, decide func()) {
	for more := true; more; {
		p.mu.Lock()
		for range decisionsAtOnce {
			if more = due(); !more {
				break
			}
			decide()
		}
		p.mu.Unlock()
	}
}

// step clusters the spikes up to now and lets the baseline age. Only its
// beginning and its end hold the lock.
func (p *spikeSampling) step(now int64) {
	p.mu.Lock()
	n := p.clusters.take()
	p.mu.Unlock()
	res := p.clusters.step(n, now)
	for _, d := range res.distances {
		p.telemetry.ProcessorSpikeSamplingNeighbourDistance.Record(p.ctx, d)
	}
	p.mu.Lock()
	p.publish(&res, now)
	ended := p.tails.Step(time.Unix(0, now))
	p.mu.Unlock()
	if ended != nil {
		reports := ended.Reports()
		p.mu.Lock()
		p.reports = reports
		p.mu.Unlock()
	}
}

// publish takes over what a clustering step found, under the lock.
func (p *spikeSampling) publish(res *stepResult, now int64) {
	res.publish()
	p.nextStep = now + p.cfg.Clustering.Stride.Nanoseconds()
	p.open = res.open
	p.count.approximate += int64(res.approximate)
	if res.err != nil {
		p.logger.Error("A clustering step failed; its spikes count as lone", zap.Error(res.err))
	}
	if res.merged > 0 {
		p.logger.Info("Clusters turned out to be one with another; what was sent keeps its spike.cluster.id", zap.Int("clusters", res.merged))
	}
	if res.incidents > 0 {
		p.logger.Info("Incidents turned out to be one with an older one; what was sent keeps its spike.incident.id", zap.Int("incidents", res.incidents))
	}
	for _, cl := range res.over {
		p.logger.Info("A cluster of spikes has left the window",
			zap.String(attrClusterID, cl.id), zap.String(attrIncidentID, cl.incident.id),
			zap.String("service.name", cl.key.service), zap.String("operation", cl.key.operation), zap.String("stage", cl.key.series),
			zap.String(attrClusterStart, timestamp(p.onWall(cl.start))), zap.String(attrClusterEnd, timestamp(p.onWall(cl.end))),
			zap.Int(attrClusterSize, cl.size), zap.Int("traces_kept", cl.kept))
	}
	for _, c := range p.baseline.Step(time.Unix(0, now)) {
		p.logger.Info("The level of a stage has changed for good; its baseline was taken over from the recent spikes",
			zap.String("service.name", c.Service), zap.String("operation", c.Operation), zap.String("stage", c.Stage),
			zap.Float64("before_seconds", c.Before), zap.Float64("after_seconds", c.After))
	}
	p.operations.expire(now - p.cfg.Baseline.Window.Nanoseconds())
}

// finish decides what is left and sends what is kept.
func (p *spikeSampling) finish() {
	p.mu.Lock()
	now := p.clock()
	p.finished = true
	p.mu.Unlock()
	p.step(now)
	p.decideDue(func() bool { return p.buffer.first != nil }, func() {
		p.decide(p.buffer.first, earlyShutdown, now)
	})
	p.handOn()
	p.drain()
	p.handOn() // nothing more: the storage forgets what was sent, and what it counted as not written
	p.save(time.Unix(0, now), true)
	p.mu.Lock()
	p.report()
	p.mu.Unlock()
}

// refused counts and logs that the next component did not take a kept trace.
func (p *spikeSampling) refused(err error, spans int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.count.downstreamErrors++
	p.count.drop(dropDownstream, spans)
	if now := p.now(); now.Sub(p.lastError) >= errorInterval {
		p.lastError = now
		p.logger.Error("The next component refused a kept trace; it is lost. Put a sending queue behind this processor", zap.Error(err))
	}
}

// errorInterval is the least time between two errors in the log.
const errorInterval = 10 * time.Second

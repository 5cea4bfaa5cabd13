//go:build linux && amd64

package ebpfllmreceiver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/collector/consumer"
	"go.opentelemetry.io/collector/consumer/consumererror"
	"go.opentelemetry.io/collector/pdata/pmetric"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/receiver"
	"go.opentelemetry.io/collector/receiver/receiverhelper"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/ebpfllm/ebpfllm/internal/assemble"
	"github.com/ebpfllm/ebpfllm/internal/clock"
	"github.com/ebpfllm/ebpfllm/internal/httphead"
	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
	"github.com/ebpfllm/ebpfllm/internal/target"
	"github.com/ebpfllm/ebpfllm/receiver/ebpfllmreceiver/internal/metadata"
)

// source is *probe.Probe, or in tests a kernel that does as it is told.
type source interface {
	Report() []probe.StageReport
	Track(pid uint32, t probe.Tracking) error
	Untrack(pid uint32) error
	AddPort(netns uint32, port uint16) error
	DropPorts() error
	Run(ctx context.Context, handle func(probe.Event)) error
	Counters() (probe.Counters, error)
	Close() error
}

// opener loads the kernel side.
type opener func(probe.Config, *zap.Logger) (source, error)

func openProbe(cfg probe.Config, logger *zap.Logger) (source, error) {
	p, err := probe.New(cfg, logger)
	if err != nil {
		return nil, err // not a source that is a nil *Probe
	}
	return p, nil
}

// Intervals, in nanoseconds of the kernel's clock.
const (
	flushInterval   = uint64(50 * time.Millisecond)
	countInterval   = uint64(time.Second)
	rescanInterval  = uint64(30 * time.Second)
	hurriedRescan   = uint64(time.Second) // when something happened that calls for one
	maxQueuedSpans  = 1 << 16
	maxQueuedPoints = 1 << 20
)

var (
	linkedByTraceparent = metric.WithAttributeSet(attribute.NewSet(attribute.String("method", assemble.LinkTraceparent)))
	linkedByNone        = metric.WithAttributeSet(attribute.NewSet(attribute.String("method", assemble.LinkNone)))
)

// kernelSide is the receiver at work: one goroutine reads the kernel's events
// and does everything up to finished batches; one per signal gives these on.
type kernelSide struct {
	cfg       *Config
	logger    *zap.Logger
	telemetry *metadata.TelemetryBuilder
	source    source
	clock     *clock.Clock
	watcher   *target.Watcher
	assembler *assemble.Assembler
	recorder  *recorder
	traces    *sender[ptrace.Traces]   // nil without a traces pipeline
	metrics   *sender[pmetric.Metrics] // nil without a metrics pipeline
	host      string

	processes  map[uint32]*process // by pid, those that requests came to
	dropped    uint64              // spans that the sender had no room for
	waiting    map[int]bool        // rules that it was said of that they match nothing
	complained map[string]bool

	// When each was last done, in nanoseconds of the kernel's clock.
	flushed, collected, counted uint64

	lost uint64 // records that the assembler has been told of

	hurry    bool   // a rescan shall not wait for rescanInterval
	rescanAt uint64 // when the next one is due
	scanTook uint64 // nanoseconds, the latest

	counts  atomic.Pointer[counts]
	cancel  context.CancelFunc
	stopped chan struct{}
}

// counts is what the self-metrics show: a reading of every second.
type counts struct {
	probe    probe.Counters
	unparsed map[string]uint64
	lost     map[string]uint64 // after the kernel's own losses
	targets  int
}

// startKernelSide loads the kernel side and begins to read it. failed is told
// of an error that ends the reading later.
func startKernelSide(set receiver.Settings, cfg *Config, traces consumer.Traces, metrics consumer.Metrics, open opener, failed func(error)) (_ *kernelSide, err error) {
	if err := checkNamespace(procRoot); err != nil {
		return nil, err
	}
	k := &kernelSide{
		cfg: cfg, logger: set.Logger, stopped: make(chan struct{}),
		processes: map[uint32]*process{}, waiting: map[int]bool{}, complained: map[string]bool{},
		watcher: target.NewWatcher(target.NewProc(procRoot), cfg.rules(), uint32(os.Getpid())),
	}
	if k.host, err = os.Hostname(); err != nil {
		k.logger.Warn("The host's name is unknown, so host.name is left out", zap.Error(err))
	}
	if k.clock, err = clock.New(clock.System); err != nil {
		return nil, err
	}
	if k.telemetry, err = metadata.NewTelemetryBuilder(set.TelemetrySettings); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			k.telemetry.Shutdown()
		}
	}()
	obs, err := receiverhelper.NewObsReport(receiverhelper.ObsReportSettings{
		ReceiverID: set.ID, Transport: "ebpf", LongLivedCtx: true, ReceiverCreateSettings: set,
	})
	if err != nil {
		return nil, err
	}
	if k.source, err = open(probe.Config{
		RingBytes: cfg.RingBufferMiB << 20, MinDuration: cfg.MinDuration, Disabled: cfg.disabled(),
	}, set.Logger); err != nil {
		return nil, fmt.Errorf("the kernel side of %s cannot start: %w", set.ID, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, k.source.Close())
		}
	}()
	report := k.source.Report()
	k.logReport(report)

	k.recorder = newRecorder(k.process, k.clock.Offset, k.telemetry)
	k.recorder.emitUnsampled = cfg.EmitUnsampled
	k.recorder.spans = traces != nil
	if metrics != nil {
		k.recorder.metrics = newMetricStore(func() uint64 { return k.clock.Offset().Unix(probe.Now()) })
	}
	k.recorder.full = k.flush
	var unavailable []stage.Stage
	for _, r := range report {
		if !r.Available {
			unavailable = append(unavailable, r.Stage)
		}
	}
	k.assembler = assemble.New(assemble.Config{
		Unavailable: unavailable, MinDuration: cfg.MinDuration.Nanoseconds(), OnCandidate: k.asked,
	}, k.recorder)

	changes, err := k.watcher.Rescan()
	if err != nil {
		return nil, err
	}
	k.apply(changes)
	k.sayWaiting()
	if k.counts.Store(&counts{}); !k.count() {
		return nil, errors.New("the kernel side's counters cannot be read")
	}
	if err := k.observe(report); err != nil {
		return nil, err
	}

	if traces != nil {
		k.traces = newSender(k.logger, maxQueuedSpans, tracesDownstream(traces, obs))
	}
	if metrics != nil {
		k.metrics = newSender(k.logger, maxQueuedPoints, metricsDownstream(metrics, obs))
	}
	ctx, cancel := context.WithCancel(context.Background())
	k.cancel = cancel
	go k.run(ctx, failed)
	return k, nil
}

const procRoot = "/proc"

// initPIDNamespace is the inode number that the kernel gives the first PID
// namespace (PROC_PID_INIT_INO).
const initPIDNamespace = "pid:[4026531836]"

// initTimeNamespace is that of the first time namespace (PROC_TIME_INIT_INO).
const initTimeNamespace = "time:[4026531834]"

// checkNamespace makes sure that /proc speaks of the pids that the kernel side
// speaks of, and that this process's clocks are the kernel's.
func checkNamespace(root string) error {
	ns, err := os.Readlink(root + "/self/ns/pid")
	if err != nil {
		return fmt.Errorf("read our own PID namespace: %w", err)
	}
	if ns != initPIDNamespace {
		return errors.New("the collector runs in a PID namespace of its own and cannot see the host's processes: give it the host's (hostPID: true in Kubernetes, --pid=host in Docker)")
	}
	ns, err = os.Readlink(root + "/self/ns/time")
	if err == nil && ns != initTimeNamespace { // Linux before 5.6 has none
		return errors.New("the collector runs in a time namespace of its own, whose clocks are not those by which the kernel measures: start it without one (no unshare --time; no linux.timeOffsets in the container's OCI configuration)")
	}
	return nil
}

// run reads until the context ends. Requests still open then are given on as
// they stand.
func (k *kernelSide) run(ctx context.Context, failed func(error)) {
	defer close(k.stopped)
	if err := k.source.Run(ctx, k.handle); err != nil {
		k.logger.Error("Reading the kernel's records has failed; no more requests are seen", zap.Error(err))
		failed(err)
	}
	k.assembler.Close()
	k.flush()
	k.collect()
	k.count()
}

// stop ends the reading, gives on what there is, and unloads the kernel side.
func (k *kernelSide) stop(ctx context.Context) error {
	k.cancel()
	<-k.stopped
	var errs []error
	if k.traces != nil {
		errs = append(errs, k.traces.stop(ctx))
	}
	if k.metrics != nil {
		errs = append(errs, k.metrics.stop(ctx))
	}
	k.telemetry.Shutdown()
	return errors.Join(append(errs, k.source.Close())...)
}

// handle takes the next event.
func (k *kernelSide) handle(e probe.Event) {
	k.assembler.Handle(e)
	switch e := e.(type) {
	case *probe.Exec:
		k.forget(e.PID)
		k.apply(k.watcher.Exec(e.PID))
	case *probe.Fork:
		k.watcher.Fork(e.PID, e.Parent)
	case *probe.Exit:
		k.forget(e.PID)
		changes := k.watcher.Exit(e.PID)
		k.apply(changes)
		k.hurry = k.hurry || len(changes) > 0
	case *probe.Listen:
		k.apply(k.watcher.Listen(e.PID))
		k.hurry = true
	case *probe.Tick:
		k.tick(e.Now)
	}
}

// tick does what is due.
func (k *kernelSide) tick(now uint64) {
	due := func(last *uint64, interval uint64) bool {
		if *last == 0 {
			*last = now
		}
		if now < *last+interval {
			return false
		}
		*last = now
		return true
	}
	if err := k.clock.Refresh(now); err != nil {
		k.complain("clock", "The clocks cannot be read; times may drift", zap.Error(err))
	}
	if due(&k.flushed, flushInterval) {
		k.flush()
	}
	if due(&k.counted, countInterval) {
		k.count()
	}
	if due(&k.collected, uint64(k.cfg.CollectionInterval)) {
		k.collect()
	}
	k.rescan(now)
}

// rescan looks at all processes if that is due. A daemon listens, forks and
// exits before its parent could be looked at, and workers that share a port by
// SO_REUSEPORT take it from the kernel side as the first of them ends. So what
// begins to listen, or a watched process's end, brings the next look forward, to
// when things have settled, and never so that looking takes more than a
// twentieth of the time.
func (k *kernelSide) rescan(now uint64) {
	if k.rescanAt == 0 {
		k.rescanAt = now + rescanInterval
	}
	if k.hurry {
		k.hurry = false
		k.rescanAt = min(k.rescanAt, now+max(hurriedRescan, 20*k.scanTook))
	}
	if now < k.rescanAt {
		return
	}
	k.rescanAt = now + rescanInterval
	begin := probe.Now()
	changes, err := k.watcher.Rescan()
	if err != nil {
		k.complain("rescan", "The processes cannot be listed", zap.Error(err))
	}
	k.apply(changes)
	if err == nil {
		if err := k.source.DropPorts(); err != nil {
			k.complain("ports", "Ports that nobody listens on any more stay watched", zap.Error(err))
		}
	}
	k.sayWaiting()
	k.scanTook = probe.Now() - begin
}

// asked is told that a candidate was asked a path.
func (k *kernelSide) asked(pid uint32, path string) {
	if httphead.IsLLMPath(path) {
		k.apply(k.watcher.Asked(pid))
	}
}

// apply does on the kernel side what the watcher wants.
func (k *kernelSide) apply(changes []target.Change) {
	for _, c := range changes {
		switch {
		case c.Track != nil:
			k.track(c.Track)
		case c.Port != nil:
			if err := k.source.AddPort(c.Port.NetNS, c.Port.Port); err != nil {
				k.complain("port", "A listening port cannot be watched: requests on its new connections are not measured. It is tried again at least every 30 s; what connects until then is known from its first read after that, its accept queue and its first byte's arrival are not",
					zap.Uint16("port", c.Port.Port), zap.Error(err))
			}
		default:
			k.forget(c.Untrack)
			if err := k.source.Untrack(c.Untrack); err != nil {
				k.complain("untrack", "A process cannot be let go", zap.Uint32("pid", c.Untrack), zap.Error(err))
			}
		}
	}
}

func (k *kernelSide) track(t *target.Tracked) {
	tracking := probe.Tracking{Candidate: t.Candidate, IsGo: t.Go.IsGo}
	if t.Go.Known {
		tracking.GoOffset = t.Go.GOffset
	}
	if err := k.source.Track(t.PID, tracking); err != nil {
		k.complain("track", "A process cannot be watched", zap.Uint32("pid", t.PID), zap.Error(err))
		return
	}
	if t.Candidate {
		k.logger.Debug("Candidate found", zap.Uint32("pid", t.PID), zap.String("executable", t.Path))
		return
	}
	k.logger.Info("Target found", zap.Uint32("pid", t.PID), zap.String("executable", t.Path),
		zap.String("service", t.ServiceName))
	if t.Go.IsGo && !t.Go.Known {
		k.complain("go "+t.Path, "The Go program's symbols are stripped, so its goroutines cannot be told apart: link it without -s to measure more than its sockets",
			zap.Uint32("pid", t.PID), zap.String("executable", t.Path))
	}
}

// sayWaiting says of each configured target, once, that it matches no process.
func (k *kernelSide) sayWaiting() {
	for _, i := range k.watcher.Unmatched() {
		if !k.waiting[i] {
			k.waiting[i] = true
			k.logger.Info("No process matches a configured target yet; it is watched as soon as it starts",
				zap.Int("target", i), zap.Any("rule", k.cfg.Targets[i]))
		}
	}
	if n := k.watcher.Denied(); n > 0 {
		k.sayDenied(n, target.NewProc(procRoot).ReadsAll())
	}
}

// sayDenied says, once, that processes could not be read, and the remedy if the
// collector lacks the capabilities for it.
func (k *kernelSide) sayDenied(processes int, capable bool) {
	if capable {
		k.once(zapcore.InfoLevel, "denied", "Some processes are hidden from the collector, though it has CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH (by a security module or a sandbox, perhaps); they are not considered",
			zap.Int("processes", processes))
		return
	}
	k.complain("denied", "Some processes may not be read and are not considered; if a target is among them, give the collector CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH",
		zap.Int("processes", processes))
}

const maxComplaints = 1024

// complain warns of something once.
func (k *kernelSide) complain(about, message string, fields ...zap.Field) {
	k.once(zapcore.WarnLevel, about, message, fields...)
}

// once says something at the given level, and after that at debug.
func (k *kernelSide) once(level zapcore.Level, about, message string, fields ...zap.Field) {
	if k.complained[about] || len(k.complained) >= maxComplaints {
		level = zapcore.DebugLevel
	} else {
		k.complained[about] = true
	}
	k.logger.Log(level, message, fields...)
}

// process returns who a request came to.
func (k *kernelSide) process(pid uint32) *process {
	if p := k.processes[pid]; p != nil {
		return p
	}
	who, ok := k.watcher.Process(pid)
	if !ok {
		k.apply(k.watcher.Served(pid))
		if who, ok = k.watcher.Process(pid); !ok {
			who = target.Process{PID: pid} // it has ended already
		}
	}
	p := &process{Process: who, host: k.host}
	k.processes[pid] = p
	return p
}

// forget is told that a process is not any more what it was.
func (k *kernelSide) forget(pid uint32) {
	if p := k.processes[pid]; p != nil {
		p.gone = true
		delete(k.processes, pid)
	}
}

// flush gives on the spans recorded so far.
func (k *kernelSide) flush() {
	batch, number := k.recorder.take()
	spans := batch.SpanCount()
	if spans == 0 || k.traces.send(batch, spans) {
		return
	}
	k.dropped += uint64(spans)
	k.recorder.drop(number)
	k.complain("queue", "The pipeline takes spans more slowly than they come; some are lost", zap.Int("spans", spans))
}

// collect gives on the metrics as they stand.
func (k *kernelSide) collect() {
	if k.metrics == nil {
		return
	}
	batch := k.recorder.metrics.collect()
	if points := batch.DataPointCount(); points > 0 && !k.metrics.send(batch, points) {
		k.complain("metrics", "The pipeline takes metrics more slowly than they come; some intervals are left out")
	}
}

// waysNotMeasured is what is said of requests that do not come over plain TCP.
var waysNotMeasured = map[string]string{
	"unix_socket": "Requests come to a target over a Unix-domain socket: these are counted and not measured; have the client use TCP on loopback to measure them",
	"mptcp":       "Requests come to a target over Multipath TCP: these are counted and not measured; to measure them start a server in Go with GODEBUG=multipathtcp=0, or switch it off with sysctl net.mptcp.enabled=0",
}

// count reads the counters for the self-metrics.
func (k *kernelSide) count() bool {
	fromProbe, err := k.source.Counters()
	if err != nil {
		k.complain("counters", "The kernel side's counters cannot be read", zap.Error(err))
		return false
	}
	if lost := lostRecords(&fromProbe); lost > k.lost {
		k.lost = lost
		k.assembler.Lost(probe.Now())
	}
	for way, n := range fromProbe.Unwatched {
		if n > 0 {
			k.complain("way "+way, waysNotMeasured[way])
		}
	}
	c := &counts{
		probe:    fromProbe,
		unparsed: k.assembler.Unparsed(),
		lost: map[string]uint64{
			"export_queue_full":    k.dropped,
			"occurrence_unclaimed": k.recorder.orphan,
		},
	}
	if k.recorder.metrics != nil {
		c.lost["metric_processes_full"] = k.recorder.metrics.refused
	}
	c.targets, _ = k.watcher.Targets()
	k.counts.Store(c)
	return true
}

// lostRecords is how many records of all kinds were lost on the way here.
func lostRecords(c *probe.Counters) (n uint64) {
	for _, lost := range c.Lost {
		n += lost
	}
	return n
}

// observe registers the self-metrics.
func (k *kernelSide) observe(report []probe.StageReport) error {
	each := func(name string, values func(*counts) []map[string]uint64) metric.Int64Callback {
		return func(_ context.Context, o metric.Int64Observer) error {
			for _, m := range values(k.counts.Load()) {
				for key, n := range m {
					o.Observe(int64(n), metric.WithAttributes(attribute.String(name, key)))
				}
			}
			return nil
		}
	}
	return errors.Join(
		k.telemetry.RegisterReceiverEbpfllmRecordsCallback(each("kind", func(c *counts) []map[string]uint64 {
			return []map[string]uint64{c.probe.Records}
		})),
		k.telemetry.RegisterReceiverEbpfllmRecordsSentCallback(each("kind", func(c *counts) []map[string]uint64 {
			return []map[string]uint64{c.probe.Sent}
		})),
		k.telemetry.RegisterReceiverEbpfllmRecordsLostCallback(each("reason", func(c *counts) []map[string]uint64 {
			return []map[string]uint64{c.probe.Lost, c.lost}
		})),
		k.telemetry.RegisterReceiverEbpfllmMapFullCallback(each("map", func(c *counts) []map[string]uint64 {
			return []map[string]uint64{c.probe.MapFull}
		})),
		k.telemetry.RegisterReceiverEbpfllmProgramsMissedCallback(each("program", func(c *counts) []map[string]uint64 {
			return []map[string]uint64{c.probe.Missed}
		})),
		k.telemetry.RegisterReceiverEbpfllmMessagesUnparsedCallback(each("reason", func(c *counts) []map[string]uint64 {
			return []map[string]uint64{c.unparsed, c.probe.Unwatched}
		})),
		k.telemetry.RegisterReceiverEbpfllmAcceptsLooseCallback(func(_ context.Context, o metric.Int64Observer) error {
			o.Observe(int64(k.counts.Load().probe.LooseAccepts))
			return nil
		}),
		k.telemetry.RegisterReceiverEbpfllmTargetsCallback(func(_ context.Context, o metric.Int64Observer) error {
			o.Observe(int64(k.counts.Load().targets))
			return nil
		}),
		k.telemetry.RegisterReceiverEbpfllmStageAvailableCallback(func(_ context.Context, o metric.Int64Observer) error {
			for _, r := range report {
				value := int64(0)
				if r.Available {
					value = 1
				}
				o.Observe(value, metric.WithAttributes(
					attribute.String("stage", r.Stage.String()), attribute.String("hook", r.Hook), attribute.String("reason", r.Reason)))
			}
			return nil
		}),
	)
}

// logReport says what is measured, by what, and what is not, and why.
func (k *kernelSide) logReport(report []probe.StageReport) {
	var measured, missing []string
	for _, r := range report {
		switch {
		case !r.Available:
			missing = append(missing, r.Stage.String()+": "+r.Reason)
		case r.Reason != "":
			measured = append(measured, r.Stage.String()+": "+r.Hook+" ("+r.Reason+")")
		default:
			measured = append(measured, r.Stage.String()+": "+r.Hook)
		}
	}
	k.logger.Info("Kernel side loaded", zap.Strings("measured", measured), zap.Strings("not_measured", missing))
}

func tracesDownstream(next consumer.Traces, obs *receiverhelper.ObsReport) downstream[ptrace.Traces] {
	return downstream[ptrace.Traces]{
		consume: func(ctx context.Context, batch ptrace.Traces) error {
			if next.Capabilities().MutatesData { // it may be asked to take the same again
				whole := batch
				batch = ptrace.NewTraces()
				whole.CopyTo(batch)
			}
			return next.ConsumeTraces(ctx, batch)
		},
		begin: obs.StartTracesOp,
		end: func(ctx context.Context, items int, err error) {
			obs.EndTracesOp(ctx, metadata.Type.String(), items, err)
		},
		rest: func(err error, batch ptrace.Traces, items int) (ptrace.Traces, int) {
			if part, ok := errors.AsType[consumererror.Traces](err); ok {
				return part.Data(), part.Data().SpanCount()
			}
			return batch, items
		},
	}
}

func metricsDownstream(next consumer.Metrics, obs *receiverhelper.ObsReport) downstream[pmetric.Metrics] {
	return downstream[pmetric.Metrics]{
		consume: func(ctx context.Context, batch pmetric.Metrics) error {
			if next.Capabilities().MutatesData {
				whole := batch
				batch = pmetric.NewMetrics()
				whole.CopyTo(batch)
			}
			return next.ConsumeMetrics(ctx, batch)
		},
		begin: obs.StartMetricsOp,
		end: func(ctx context.Context, items int, err error) {
			obs.EndMetricsOp(ctx, metadata.Type.String(), items, err)
		},
		rest: func(err error, batch pmetric.Metrics, items int) (pmetric.Metrics, int) {
			if part, ok := errors.AsType[consumererror.Metrics](err); ok {
				return part.Data(), part.Data().DataPointCount()
			}
			return batch, items
		},
	}
}

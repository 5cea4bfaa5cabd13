// Package lab puts the receiver to the test: it injects one known fault at a time
// into a server under steady load and compares what the receiver says of each
// request with what was done to it.
//
// A Scenario is data and, where the server cannot do the fault itself, one small
// function. There are two kinds of fault:
//
//   - by request: Affected differs from Normal. Every so many requests ask for
//     Affected (another path, which the server delays), and Before, if there is
//     one, prepares the ground just before such a request is sent (it evicts a
//     file). The requests that asked for it are the affected ones.
//   - from outside: Inject acts on the server (a signal, a busy CPU) for Length
//     and undoes it. It is called again and again; the requests in flight during
//     at least MinAffected of it are the affected ones. Those that touch it for
//     less belong to neither side.
//
// Requests are matched by their trace id: the client makes a traceparent for each
// and notes when it began and ended. What is tested is the real receiver, made by
// its factory and read through a traces consumer.
//
// The unaffected requests of the same run give the median of every stage; what an
// affected request has more than that is its excess, and the stage to be named is
// chosen from the excesses as the spike_sampling processor does. Each scenario is
// run a second time without the fault, under the same load: the host is shared, and
// what it does by itself is not the receiver's mistake.
package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"go.opentelemetry.io/collector/pdata/pcommon"

	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// MinAffected is how long a fault from outside must hold a request to count as its
// cause, and the least length of a fault: a millisecond of noise does not matter
// beside it.
const MinAffected = 20 * time.Millisecond

// A Scenario is one fault on one server, and what has to be said of it.
type Scenario struct {
	Name   string // unique, GROUP/FAULT/SERVER: "host/lock/threads"
	What   string // one line: what is done, and why that stage
	Report string // public report that it reproduces, as owner/repository#number; "" if none
	Server Server

	Stage string   // stage that explains the delay, by its exported name
	Also  []string // stages that are as right as Stage
	// Brings are stages that the fault costs time in besides: they are no right name,
	// and what they have counts as told.
	Brings []string
	// Evidence, if not "", is an attribute of the request's span, in seconds, that must
	// tell how much the fault added, as it lies before the span: Stage is Nothing.
	Evidence string
	Control  bool // the kernel is innocent, and a stall is blame; Stage is "cpu", "wait" or Nothing

	// Invisible, if not "", tells why no kernel evidence can decide this case. It
	// is run and shown, and held to no bar.
	Invisible string
	// Shared: the stall of an affected request is that of the thread which serves all.
	// Those that the thread had read before, and that waited with it for MinAffected,
	// must have the same stall, as one that is shared.
	Shared bool
	Quick  bool // belongs to the short list that --quick and the tests run

	Normal   Ask // what unaffected requests ask for
	Affected Ask // what affected ones ask for; the zero Ask means Normal
	Load     Load

	// Length of the fault, at least MinAffected; 40 ms if 0. It is in Rig.Length
	// too. Where a path carries it, write it into the path.
	Length time.Duration

	// Setup is called once, when the server is up and before any load: it makes
	// cgroups, files, links. What it does is undone by Rig.Cleanup. An error
	// made by Unavailable skips the scenario and says why.
	Setup func(context.Context, *Rig) error
	// Before is called before each request for Affected is sent. In the run
	// without the fault it is not called.
	Before func(context.Context, *Rig) error
	// Inject acts on the server from outside: it begins the fault, holds it for
	// the duration and ends it. It returns when the fault has ended.
	Inject func(context.Context, *Rig, time.Duration) error
	// Added tells how much longer an affected request took because of the fault.
	// By default it is what the server says in the response header
	// Fault-Nanoseconds (the wall time of the delay itself, less its median over
	// the unaffected requests), or without that the client's latency less the
	// median of the unaffected requests. The header Queued-Nanoseconds, how long the
	// answering thread was kept from a CPU by the scheduler's statistics, lets
	// requests be set aside that the host delayed as well.
	Added func(s *Sample, usual time.Duration) time.Duration
	// Left tells when the answer to a client's port had left the server's host, where
	// that can be known: a fault from outside does not affect it any more.
	Left func(port uint16) time.Time
}

// A Server is a program to ask.
type Server struct {
	Name string // its shape in the table: "threads", "loop", "go", "uvicorn"

	// Go: goroutines serve the requests, and so the bar for thread stages is
	// lower.
	Go bool
	// Serial: one thread serves all requests. Whoever is in flight beside an
	// affected request is held up with it, and belongs to neither side.
	Serial bool

	// Start starts it (Rig.Spawn) and returns when it answers. It sets Rig.Addr
	// and Rig.PIDs, and what else the faults need in Rig.Paths. An error made by
	// Unavailable skips the scenario and says why.
	Start func(context.Context, *Rig) error
}

// An Ask is how one request is made. The zero Ask is GET /.
type Ask struct {
	Method string // GET if ""
	Path   string // with its query; / if ""
	Header map[string]string
	// Body, if there is one, makes the body; it may be slow on purpose. Length is
	// its Content-Length, or -1 to send it in chunks.
	Body   func() io.Reader
	Length int64
	// Read reads the answer's body to its end; nil reads it at once.
	Read func(context.Context, io.Reader) error
	// NewConn: on a connection of its own. The request's time then includes
	// connecting.
	NewConn bool
}

func (a *Ask) isZero() bool {
	return a.Method == "" && a.Path == "" && a.Header == nil && a.Body == nil && a.Read == nil && !a.NewConn
}

// Load is the steady load. Each connection sends its requests at fixed times; one
// that is late sends as soon as it can.
type Load struct {
	Connections int     // kept-alive connections that ask by turns; 4 if 0
	Rate        float64 // requests per second of all together; 200 if 0
	Every       int     // every so many requests ask for Affected; 16 if 0, 20 on a Serial server
	// Dial connects; nil is Rig.Dial.
	Dial func(context.Context, *Rig) (net.Conn, error)
}

// Sample is a request as the client knows it.
type Sample struct {
	Trace      pcommon.TraceID
	Span       pcommon.SpanID // the parent that the traceparent names
	Asked      bool           // it asked for Affected
	Prepared   time.Time      // before Before; zero without it
	Start, End time.Time      // before connecting or the first byte sent; after the last byte read
	Left       time.Time      // the answer had left the server's host, by Scenario.Left; zero without it
	Fault      time.Duration  // the header Fault-Nanoseconds; 0 without it
	Queued     time.Duration  // the header Queued-Nanoseconds; 0 without it
	Account    bool           // there was such a header
	conn       int            // the connection of the load that it was on
	where      string         // where it lies to the faults, for whoever looks into it
}

// Latency is the time that the client waited.
func (s *Sample) Latency() time.Duration { return s.End.Sub(s.Start) }

// unavailable is why a scenario cannot be run here.
type unavailable struct{ reason string }

func (u unavailable) Error() string { return u.reason }

// Unavailable makes the error by which Start and Setup say that this machine lacks
// what the scenario needs, and what would help. The scenario is then reported as
// skipped, with the reason.
func Unavailable(format string, arguments ...any) error {
	return unavailable{fmt.Sprintf(format, arguments...)}
}

// A Class is a group of scenarios that one bar holds for.
type Class string

// The classes.
const (
	ClassSocket  Class = "socket"  // read from socket state, whatever the server does
	ClassThread  Class = "thread"  // a thread, or an event loop, serves the request
	ClassGo      Class = "go"      // goroutines move between threads
	ClassControl Class = "control" // the kernel is innocent
)

// Class is the class that the scenario belongs to.
func (s *Scenario) Class() Class {
	known, _ := stage.Parse(s.Stage)
	switch {
	case s.Control:
		return ClassControl
	case known.Socket():
		return ClassSocket
	case s.Server.Go:
		return ClassGo
	}
	return ClassThread
}

// right tells whether a stage that was named is right.
func (s *Scenario) right(named string) bool { return accepts(s.Stage, s.Also, named) }

func accepts(stage string, also []string, named string) bool {
	return named == stage || slices.Contains(also, named)
}

// withDefaults fills in what was left open.
func (s Scenario) withDefaults() Scenario {
	if s.Affected.isZero() {
		s.Affected = s.Normal
	}
	if s.Length == 0 {
		s.Length = 40 * time.Millisecond
	}
	if s.Load.Connections == 0 {
		s.Load.Connections = 4
	}
	if s.Load.Rate == 0 {
		s.Load.Rate = 200
	}
	if s.Load.Every == 0 {
		s.Load.Every = 16
		if s.Server.Serial {
			s.Load.Every = 20
		}
	}
	return s
}

// Estimate is about how long the scenario takes, where the server keeps up with the load.
func (s Scenario) Estimate(size Size) time.Duration {
	const around = 3.5 // seconds: start, warm up, wait for the last spans, end
	s = s.withDefaults()
	length, after := s.Length.Seconds(), settling.Seconds()
	var cycle, affected, touched float64 // seconds from fault to fault, requests that it affects, the share of the time that is neither side's
	if s.Inject == nil {
		cycle, affected = float64(s.Load.Every)/s.Load.Rate, 1
		switch {
		case s.Load.Connections == 1: // nobody is in flight beside it
			touched = after / cycle
		case s.Server.Serial:
			touched = (length + after) / cycle
		}
	} else {
		cycle = length + 1.25*pauseAfter(s.Length).Seconds()
		affected = min(float64(s.Load.Connections), s.Load.Rate*(length-MinAffected.Seconds()))
		touched = (length + after) / cycle
	}
	undisturbed := float64(size.Unaffected) * 1.05 / s.Load.Rate
	paired := undisturbed / pairedPart
	faulty := max(float64(size.Affected)/affected*cycle, undisturbed/max(0.1, 1-touched-1/float64(s.Load.Every)))
	limit := size.Timeout.Seconds()
	return duration(around + min(limit, paired) + min(limit, faulty))
}

// Validate tells what is wrong with the scenario as data.
func (s *Scenario) Validate() error {
	var errs []error
	if s.Name == "" || s.What == "" || s.Server.Name == "" || s.Server.Start == nil || s.Stage == "" {
		errs = append(errs, errors.New("needs Name, What, Stage and Server"))
	}
	byRequest := !s.Affected.isZero()
	if byRequest == (s.Inject != nil) {
		errs = append(errs, errors.New("needs either Affected or Inject"))
	}
	if s.Shared && (!byRequest || !s.Server.Serial) {
		errs = append(errs, errors.New("has Shared without Affected on a Serial server: nothing is shared"))
	}
	if s.Before != nil && !byRequest {
		errs = append(errs, errors.New("has Before without Affected: it is never called"))
	}
	if s.Length != 0 && s.Length < MinAffected {
		errs = append(errs, fmt.Errorf("has a Length of %v, shorter than %v", s.Length, MinAffected))
	}
	for _, right := range append([]string{s.Stage}, s.Also...) {
		if s.Evidence != "" && right != Nothing {
			errs = append(errs, fmt.Errorf("has Evidence, which is of %s, and the stage %s", Nothing, right))
		}
		if s.Control && isStall(right) {
			errs = append(errs, fmt.Errorf("a control is cpu, wait or %s, not %s", Nothing, right))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("scenario %q: %w", s.Name, err)
	}
	return nil
}

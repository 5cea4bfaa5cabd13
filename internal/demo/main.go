// Command demo shows the distribution explaining real latency spikes of a real
// streaming server. It starts both, sends normal requests and delayed ones, and
// prints each trace that was kept as a tree with its stages and their cause. The
// kept traces are also in spikes.jsonl, as OTLP JSON. Its last line counts:
//
//	requests=N spikes=N kept_spikes=N right_stage=N kept_normal=N
//
// It exits with 0 only if nine spikes in ten were kept with the right stage to
// blame and at most one normal request in a hundred was kept.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/ebpfllm/ebpfllm/internal/loadtest"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func run() error {
	var names []string
	for _, k := range loadtest.Kinds() {
		names = append(names, k.String())
	}
	o := loadtest.Options{Log: os.Stderr}
	flag.StringVar(&o.Collector, "collector", "dist/otelcol-ebpfllm", "the distribution's `path`")
	flag.StringVar(&o.Server, "server", loadtest.LLMServer, fmt.Sprintf("the `program` to put under load, %s or %s", loadtest.LLMServer, loadtest.LlamaCPP))
	flag.BoolVar(&o.Uninstrumented, "uninstrumented", false, "run server and client without OpenTelemetry: the receiver opens the traces")
	flag.StringVar(&o.Out, "out", "out", "`directory` for spikes.jsonl, the logs and the collector's configuration")
	flag.IntVar(&o.WarmUp, "warm-up", 0, "normal requests before the first spike (default 400, for llamacpp 200)")
	flag.IntVar(&o.Normal, "normal", 0, "normal requests among the spikes (default 400, for llamacpp 200)")
	flag.IntVar(&o.Spikes, "spikes", 30, "delayed requests")
	flag.DurationVar(&o.Delay, "delay", 100*time.Millisecond, "length of a delay, where it can be chosen")
	kinds := flag.String("kinds", "", "`stages` to delay, by commas: "+strings.Join(names, ",")+" (default: all that the server can suffer)")
	timeout := flag.Duration("timeout", 2*time.Minute, "give up after this long")
	flag.Parse()
	if flag.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q; see -help", flag.Arg(0))
	}
	for name := range strings.FieldsFuncSeq(*kinds, func(r rune) bool { return r == ',' }) {
		s, ok := stage.Parse(name)
		if !ok {
			return fmt.Errorf("-kinds: there is no stage %q; choose from %s", name, strings.Join(names, ","))
		}
		o.Kinds = append(o.Kinds, s)
	}
	number := map[string]int{loadtest.LLMServer: 400, loadtest.LlamaCPP: 200}[o.Server]
	o.WarmUp, o.Normal = cmp.Or(o.WarmUp, number), cmp.Or(o.Normal, number)
	if o.Delay < 2*loadtest.MinStall {
		return fmt.Errorf("-delay %v: must be at least %v", o.Delay, 2*loadtest.MinStall)
	}

	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	ctx, cancel = context.WithTimeoutCause(ctx, *timeout, errors.New("-timeout is over"))
	defer cancel()
	report, err := loadtest.Run(ctx, o)
	if err != nil {
		return err
	}
	report.Write(os.Stdout)
	return report.Err()
}

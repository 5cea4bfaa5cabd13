// Truthlab injects known faults into servers under load and compares what the
// receiver says of each request with what was done to it. It prints a table that
// holds each figure to its bar and writes the report to out/truth.json and the
// confusion matrix to out/truth.svg. The exit status is 1 if a bar is missed.
//
//	go run ./internal/truthlab -list
//	go run ./internal/truthlab -run 'host/lock'
//	go run ./internal/truthlab -fault-cmd 'kill -STOP $SERVER_PIDS; sleep 0.06; kill -CONT $SERVER_PIDS' -stage stopped
//	go run ./internal/truthlab -server-cmd './my-server --port $PORT' -slow /work -stage cpu -control
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/ebpfllm/ebpfllm/internal/truthlab/lab"
	"github.com/ebpfllm/ebpfllm/internal/truthlab/scenarios"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "truthlab:", err)
		os.Exit(1)
	}
}

func run() (err error) {
	var (
		list      = flag.Bool("list", false, "list the scenarios, with about how long each takes, and end")
		pattern   = flag.String("run", "", "run the scenarios whose name matches this regular expression")
		quick     = flag.Bool("quick", false, "run the short list, with fewer requests: for tests, not for figures")
		add       = flag.Bool("add", false, "keep the other scenarios' results in the report that is there")
		out       = flag.String("out", "out", "directory of truth.json and truth.svg, with a command own.json and own.svg")
		docs      = flag.String("docs", "", "run nothing: put the table of the report into this Markdown page, and the picture beside it")
		serverCmd = flag.String("server-cmd", "", "a shell command that serves HTTP/1.1 on 127.0.0.1:$PORT, in place of the scenarios' servers")
		faultCmd  = flag.String("fault-cmd", "", "a shell command that disturbs the server ($SERVER_PIDS on $SERVER_CPU, at $SERVER_ADDR) for $FAULT_MS milliseconds and ends")
		path      = flag.String("path", "/", "with a command: the path that requests ask for")
		slow      = flag.String("slow", "", "with -server-cmd: the path that affected requests ask for, in place of -fault-cmd")
		stage     = flag.String("stage", "", "with a command: the stage that has to be named")
		control   = flag.Bool("control", false, "with a command: the kernel is innocent, and -stage is cpu or wait")
		body      = flag.String("body", "", "with a command: requests POST this JSON")
		name      = flag.String("name", "command", "with a command: what the case is called in the report")
		serial    = flag.Bool("serial", false, "with -server-cmd: one thread serves all requests, as an event loop does")
		isGo      = flag.Bool("go", false, "with -server-cmd: goroutines serve the requests")
		patience  = flag.Duration("wait", lab.Patience, "with -server-cmd: how long it may take until it answers")
	)
	flag.Parse()
	if flag.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q: scenarios are chosen by -run", flag.Arg(0))
	}
	report, picture := filepath.Join(*out, "truth.json"), filepath.Join(*out, "truth.svg")
	if *docs != "" {
		return document(report, *docs)
	}
	chosen, err := choose(*pattern, *quick)
	if err != nil {
		return err
	}
	if *serverCmd != "" || *faultCmd != "" {
		own, err := scenarios.Command(scenarios.CommandOptions{
			Server: *serverCmd, Fault: *faultCmd, Path: *path, Slow: *slow, Body: *body, Stage: *stage, Control: *control, Name: *name,
			Serial: *serial, Go: *isGo, Patience: *patience,
		})
		if err != nil {
			return err
		}
		chosen = []lab.Scenario{own}
		report, picture = filepath.Join(*out, "own.json"), filepath.Join(*out, "own.svg")
	}
	size := lab.Full
	if *quick {
		size = lab.Quick
	}
	if *list {
		var all time.Duration
		for _, s := range chosen {
			takes := s.Estimate(size)
			all += takes
			fmt.Printf("%-44s %-14s %3.0f s  %s\n", s.Name, s.Stage, takes.Seconds(), strings.Join(strings.Fields(s.What+" "+s.Report), " "))
		}
		fmt.Printf("%d scenarios, about %.0f minutes\n", len(chosen), all.Minutes())
		return nil
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	context.AfterFunc(ctx, stop) // a second one ends this at once
	l, err := lab.New(ctx, size, os.Stderr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	if err := os.MkdirAll(*out, 0o755); err != nil {
		return err
	}
	now, all := lab.NewReport(size), lab.NewReport(size)
	before, err := lab.ReadReport(report)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	whole := *pattern == "" && !*quick && *serverCmd == "" && *faultCmd == ""
	switch {
	case err != nil:
	case *add && before.Size != all.Size:
		return fmt.Errorf("%s holds figures of another size (%s): remove it, or write elsewhere by -out", report, before.Size)
	case *add:
		all.Scenarios, all.Lost = before.Scenarios, before.Lost
	case !whole && before.HasOthers(chosen):
		return fmt.Errorf("%s holds results of other scenarios, which would be lost: -add keeps them, -out writes elsewhere", report)
	}
	for i, s := range chosen {
		fmt.Fprintf(os.Stderr, "%d/%d %s: %s\n", i+1, len(chosen), s.Name, s.What)
		result := l.Run(ctx, s)
		if ctx.Err() != nil {
			return errors.New("interrupted")
		}
		now.Add(result)
		all.Add(result)
		// after each, so that a long run that breaks off has left something
		if err := save(all, report, picture); err != nil {
			return err
		}
	}
	if err := now.Write(os.Stdout); err != nil {
		return err
	}
	if now.Err() != nil {
		return errors.New("not every scenario could be run and holds its bars: see the table")
	}
	return nil
}

// choose returns the scenarios that are asked for.
func choose(pattern string, quick bool) (chosen []lab.Scenario, err error) {
	re, err := regexp.Compile(pattern)
	if err != nil {
		return nil, fmt.Errorf("-run: %w", err)
	}
	for _, s := range scenarios.All() {
		if re.MatchString(s.Name) && (s.Quick || !quick || pattern != "") {
			chosen = append(chosen, s)
		}
	}
	if len(chosen) == 0 {
		return nil, fmt.Errorf("no scenario matches %q: -list names them", pattern)
	}
	return chosen, nil
}

// save writes report and picture.
func save(r *lab.Report, report, picture string) error {
	if err := r.Save(report); err != nil {
		return err
	}
	return draw(r, picture)
}

func draw(r *lab.Report, picture string) error {
	var b bytes.Buffer
	if err := r.Draw(&b); err != nil {
		return err
	}
	return lab.WriteWhole(picture, b.Bytes())
}

// document puts the report's table into a page, and the picture beside it.
func document(report, page string) error {
	r, err := lab.ReadReport(report)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	filled, err := r.Document(string(text))
	if err != nil {
		return fmt.Errorf("%s: %w", page, err)
	}
	if err := lab.WriteWhole(page, []byte(filled)); err != nil {
		return err
	}
	return draw(r, filepath.Join(filepath.Dir(page), "accuracy.svg"))
}

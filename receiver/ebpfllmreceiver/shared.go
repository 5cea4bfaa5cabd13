//go:build linux && amd64

package ebpfllmreceiver

import (
	"context"
	"errors"
	"sync"

	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/component/componentstatus"
	"go.opentelemetry.io/collector/consumer"
	"go.opentelemetry.io/collector/receiver"
)

// instance is what the pipelines of one configured receiver share: the Collector
// creates a component for each signal, but the kernel side is there once. It runs
// from the first Start to the last Shutdown.
type instance struct {
	cfg      *Config
	settings receiver.Settings
	traces   consumer.Traces  // nil without a traces pipeline
	metrics  consumer.Metrics // nil without a metrics pipeline
	open     opener

	members int // components not yet shut down
	running int // of them, started
	side    *kernelSide
}

// instances are found by their configuration, of which the Collector has one per
// component id.
var instances struct {
	sync.Mutex
	m map[*Config]*instance
}

// member is the component of one pipeline.
type member struct {
	instance *instance
	started  bool
	ended    bool
}

// join adds a pipeline to the receiver's instance.
func join(settings receiver.Settings, cfg *Config, open opener, add func(*instance)) *member {
	instances.Lock()
	defer instances.Unlock()
	if instances.m == nil {
		instances.m = map[*Config]*instance{}
	}
	in := instances.m[cfg]
	if in == nil {
		in = &instance{cfg: cfg, settings: settings, open: open}
		instances.m[cfg] = in
	}
	in.members++
	add(in)
	return &member{instance: in}
}

// Start starts the kernel side unless another pipeline has.
func (m *member) Start(_ context.Context, host component.Host) error {
	instances.Lock()
	defer instances.Unlock()
	if m.started || m.ended {
		return errors.New("started twice, or after its shutdown")
	}
	in := m.instance
	if in.side == nil {
		side, err := startKernelSide(in.settings, in.cfg, in.traces, in.metrics, in.open, func(err error) {
			componentstatus.ReportStatus(host, componentstatus.NewPermanentErrorEvent(err))
		})
		if err != nil {
			return err
		}
		in.side = side
	}
	if (in.traces != nil) != (in.side.traces != nil) || (in.metrics != nil) != (in.side.metrics != nil) {
		return errors.New("this pipeline was created after another one of the receiver had started")
	}
	m.started = true
	in.running++
	return nil
}

// Shutdown stops the kernel side if no other pipeline uses it any more.
func (m *member) Shutdown(ctx context.Context) error {
	instances.Lock()
	defer instances.Unlock()
	if m.ended {
		return nil
	}
	m.ended = true
	in := m.instance
	if in.members--; in.members == 0 {
		delete(instances.m, in.cfg)
	}
	if !m.started {
		return nil
	}
	if in.running--; in.running > 0 {
		return nil
	}
	side := in.side
	in.side = nil
	return side.stop(ctx)
}

"""The recurrent layers of torch in a proxy: their products as sites, where torch has one compiled kernel."""
